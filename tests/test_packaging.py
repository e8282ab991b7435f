"""The package is what its metadata, its constraints file and its documentation say it is."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata, resources
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import evolute as ev
from evolute import errors

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
PINS = {
    canonicalize_name(pin.name): pin
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
    for pin in [Requirement(line)]
}
CONTRACT = {
    "EmpiricalFisher",
    "FunctionalHessian",
    "GaussNewton",
    "Hessian",
    "Loss",
    "Objective",
    "Part",
    "Space",
    "from_dense",
    "from_matvec",
    "groups",
    "to_dense",
}


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_version_is_the_one_of_the_metadata() -> None:
    assert metadata.version("evolute") == PROJECT["version"]


def test_changelog_has_a_place_for_changes() -> None:
    assert re.search(rf"^## \[(Unreleased|{PROJECT['version']})\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)


def test_types_are_shipped() -> None:
    assert resources.files("evolute").joinpath("py.typed").is_file()


def test_public_names_are_the_contract_and_the_errors() -> None:
    assert set(ev.__all__) >= CONTRACT | {name for name in vars(errors) if name.endswith("Error")}


def test_every_public_name_exists_and_says_what_it_is() -> None:
    for name in ev.__all__:
        value = getattr(ev, name)
        assert not callable(value) or (value.__doc__ or "").strip(), name


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    listed = set(re.findall(r"^::: evolute\.(?!errors)(\w+)$", pages, re.MULTILINE))
    assert listed == {name for name in ev.__all__ if callable(getattr(ev, name)) and not hasattr(errors, name)}


def test_core_dependencies_are_what_the_core_imports() -> None:
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "src").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    imported = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"evolute"}
    pages = {Requirement(each).name for each in PROJECT["optional-dependencies"]["report"]}  # loaded when one is drawn
    assert imported - pages == {Requirement(each).name for each in PROJECT["dependencies"]}


def test_importing_needs_no_extra() -> None:
    extras = ["transformers", "peft", "accelerate", "sklearn", "matplotlib", "PIL"]
    assert python(f"import sys, evolute; print([name for name in {extras} if name in sys.modules])") == "[]"


@pytest.mark.parametrize("requirement", sum(EXTRAS.values(), start=PROJECT["dependencies"]))
def test_constraints_pin_a_version_that_is_allowed(requirement: str) -> None:
    wanted = Requirement(requirement)
    (pin,) = PINS[canonicalize_name(wanted.name)].specifier
    assert pin.operator == "=="
    assert wanted.specifier.contains(pin.version)


def test_constraints_hold_anywhere() -> None:
    for pin in PINS.values():
        assert pin.url is None, f"{pin}: a path or address of one machine"
        assert "+" not in str(pin.specifier), f"{pin}: a local version"


def test_constraints_are_what_is_installed_here() -> None:
    for name, pin in PINS.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # of an extra that is not installed, or of another platform
        assert pin.specifier.contains(version, prereleases=True), f"{pin}, but {version} is installed; run `make test`"
