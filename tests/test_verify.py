"""`evolute verify`: statements, outcomes, exit codes, and what is printed."""

import json
import math
import subprocess
import sys
import tomllib
from dataclasses import fields, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

import evolute as ev
from evolute import cli, verify
from evolute.verify import statement as registry
from evolute.verify.run import Outcome
from evolute.verify.statement import Sampler, Statement, excess, first_line, relative_error

SCALAR = "spectrum of H_o"


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def command(*arguments: str) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert isinstance(left.value.code, int)
    return left.value.code


def square(name: str, factor: float = 2.0, **changes: Any) -> Statement[torch.Tensor]:
    """d(x²) = `factor` x."""
    made = Statement(
        name,
        "d(x²) = 2x",
        sample=lambda draw: draw.normal(3),
        closed=lambda x: factor * torch.diag(x),
        oracle=lambda x: verify.oracle.jacobian(lambda x: x**2, [x], 0),
    )
    return replace(made, **changes)


# ---------------------------------------------------------------- statements and outcomes


def test_a_right_statement_holds_and_a_wrong_one_does_not() -> None:
    right, wrong = verify.run([square("right"), square("wrong", 2.1)], trials=4)
    assert right.holds and right.as_expected and right.largest_error < 1e-15 and right.trials == 4
    assert not wrong.holds and not wrong.as_expected and wrong.largest_error == pytest.approx(0.05)
    assert right.closed_seconds > 0 and right.oracle_seconds > 0 and right.note == ""


def test_an_erratum_is_expected_to_fail_and_not_to_hold() -> None:
    fails, holds = verify.run([square("off", 2.1, erratum=True), square("fine", erratum=True)])
    assert fails.as_expected and not fails.holds and holds.holds and not holds.as_expected


def test_an_exception_is_a_failure_that_is_told() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such thing\nat all")

    (outcome,) = verify.run([square("raises", closed=broken)])
    assert not outcome.holds and outcome.largest_error == math.inf and outcome.note == "ValueError: no such thing"


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.full((3, 3), torch.nan, dtype=torch.float64)])
def test_sizes_that_differ_and_nan_do_not_hold(wrong: torch.Tensor) -> None:
    (outcome,) = verify.run([square("odd", closed=lambda x: wrong)])
    assert not outcome.holds and outcome.largest_error == math.inf


def test_errors() -> None:
    one, zero = torch.ones(2, 2), torch.zeros(2, 2)
    assert relative_error(zero, zero) == 0 and relative_error(one, zero) == math.inf
    assert relative_error(2 * one, one) == 1 and relative_error(one[0], one) == math.inf
    assert excess(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 5.0])) == 0.25
    assert excess(torch.tensor([0.0, 4.0]), torch.tensor([0.0, 3.0])) == 0, "a bound of zero, attained"
    assert excess(torch.tensor(0.0), torch.tensor(1.0)) == math.inf


def test_problems_come_from_the_seed_and_the_name_alone() -> None:
    """One statement alone, or after others: the same problems, and the worst can be drawn again."""
    first, second = square("a", 2.1, error=excess), square("b", 2.2, error=excess)
    together, alone = list(verify.run([first, second], seed=3))[1], next(verify.run([second], seed=3))
    assert together.worst_seed == alone.worst_seed and together.largest_error == alone.largest_error
    assert next(verify.run([second], seed=4)).worst_seed != alone.worst_seed
    draws = [Sampler(alone.worst_seed).normal(3) for _ in range(2)]
    assert torch.equal(*draws)


def test_sampling_reaches_both_ends_and_nothing_beyond() -> None:
    draw = Sampler(0)
    assert {draw.integer(2, 4) for _ in range(50)} == {2, 3, 4}
    assert {draw.choice(0.0, 1.0) for _ in range(50)} == {0.0, 1.0}


def test_every_statement_has_a_name_of_its_own_and_says_something() -> None:
    statements = verify.registered()
    assert len({s.name for s in statements}) == len(statements) > 40
    assert all(" · " in s.name and s.says.strip() for s in statements)
    families = {s.name.partition(" · ")[0] for s in statements}
    assert families >= {f"Theorem {n}" for n in ("1", "2", "3", "3.1", "3.2", "4", "5", "6")} | {"Scalar attention"}
    sublayers = {"LayerNorm", "RMSNorm", "Activation", "Softmax", "Feed-forward", "Attention", "Loss"}
    assert families >= sublayers | {"Block", "Encoder layer"}


@pytest.mark.usefixtures("own_registry")
def test_a_name_is_registered_once() -> None:
    verify.register(square("Mine · new"))
    assert verify.registered()[-1].name == "Mine · new"
    with pytest.raises(ValueError, match="two statements named 'Mine · new'"):
        verify.register(square("Mine · new"))


def test_selecting() -> None:
    found = verify.select(verify.registered(), "layernorm HESSIAN")
    assert [s.name for s in found] == ["Theorem 3 · LayerNorm Hessian"]
    with pytest.raises(ev.UnknownGroupError, match="no statement contains 'zzz'"):
        verify.select(verify.registered(), "zzz")


def test_first_line_is_the_equation() -> None:
    def formula() -> None:
        """A = B.    [Theorem 9]

        More.
        """

    assert first_line(formula) == "A = B" and first_line(lambda: None) == ""


# ---------------------------------------------------------------- the command


def test_all_statements_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("verify", "--trials", "1", "--as-printed", "--seed", "11") == 0
    out = capsys.readouterr().out
    expected = [s for s in verify.registered() if not s.erratum]
    assert f"All {len(expected)} statements hold; 7 printed statements do not" in out
    assert out.count("does not hold (erratum)") == 7 and "cannot be computed" in out


@pytest.mark.usefixtures("own_registry")
def test_a_broken_statement_makes_it_exit_1_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    verify.register(square("Broken · square [x]", 2.1), square("Broken · fine"))
    assert command("verify", "--only", "Broken") == 1
    out = capsys.readouterr().out
    assert "does not hold" in out and "1 of 2 not as stated: Broken · square [x]." in out


@pytest.mark.usefixtures("own_registry")
def test_an_erratum_that_holds_makes_it_exit_1() -> None:
    verify.register(square("Errata · none", erratum=True))
    assert command("verify", "--only", "Errata", "--as-printed") == 1


def test_json_is_valid_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("verify", "--json", "--only", "Theorem 3.2", "--as-printed", "--trials", "2", "--seed", "5") == 0
    document = json.loads(capsys.readouterr().out, parse_constant=lambda constant: pytest.fail(constant))
    assert {k: document[k] for k in ("evolute", "torch", "seed", "trials", "passed")} == {
        "evolute": ev.__version__,
        "torch": torch.__version__,
        "seed": 5,
        "trials": 2,
        "passed": True,
    }
    chosen = verify.select(verify.registered(), "Theorem 3.2")
    assert [s["name"] for s in document["statements"]] == [s.name for s in chosen]
    for entry in document["statements"]:
        assert set(entry) == {f.name for f in fields(Outcome)} | {"as_expected"}
    last = document["statements"][-1]
    assert last["erratum"] and not last["holds"] and last["largest_error"] is None and "shapes" in last["note"]


def test_json_to_a_file_leaves_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    assert command("verify", "--only", SCALAR, "--json", str(file), "--trials", "1") == 0
    assert "largest error" in capsys.readouterr().out
    assert json.loads(file.read_text("utf-8"))["passed"] is True


def test_json_without_a_file_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("verify", "--only", SCALAR, "--trials", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


def test_list_runs_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evolute.cli.verify.run", lambda *_, **__: pytest.fail("nothing is to be run"))
    assert command("verify", "--list") == 0
    out = capsys.readouterr().out
    names = [s.name for s in verify.registered()]
    assert all((s.name in out) != s.erratum for s in verify.registered()) and len(names) > 40


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["verify", "--speed"], "No such option: --speed"),
        (["verify", "--trials", "0"], "'--trials'"),
        (["verify", "--trials", "many"], "'--trials'"),
        (["verify", "--seed", "-1"], "'--seed'"),
        (["verify", "more"], "unexpected extra argument"),
        (["verify", "--only", "zzz"], "no statement contains 'zzz'"),
        (["verify", "--only", "without ∂P"], "add --as-printed"),
        (["verify", "--json", "/no/such/folder/x.json"], "cannot write to '/no/such/folder/x.json'"),
        (["unfold"], "No such command 'unfold'"),
    ],
)
def test_nonsense_is_told_in_one_sentence(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*arguments) == 2
    out, err = capsys.readouterr()
    assert (
        out == ""
        and told in err
        and err.startswith("evolute: ")
        and err.count("\n") == 1
        and err.endswith((".\n", "?\n"))
    )


@pytest.mark.parametrize("arguments", [[], ["--help"], ["verify", "--help"]])
def test_help_teaches(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*arguments) == 0
    out = capsys.readouterr().out
    assert "evolute verify" in out
    if "verify" in arguments:
        assert all(each in out for each in ("--seed", "--trials", "--only", "--json", "--list", "--as-printed"))
        assert "Exit code" in out


def test_the_installed_command_is_the_one_tested_here() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    (entry,) = [EntryPoint(name, value, "console_scripts") for name, value in project["scripts"].items()]
    assert entry.name == "evolute" and entry.load() is cli.main


def test_the_number_of_threads_is_what_it_was() -> None:
    before = torch.get_num_threads()
    command("verify", "--only", SCALAR, "--trials", "1")
    assert torch.get_num_threads() == before


def test_as_a_module_and_without_a_terminal() -> None:
    """No progress bar and no colours where nobody is watching."""
    arguments = [sys.executable, "-m", "evolute", "verify", "--only", SCALAR, "--trials", "1"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "" and "\x1b" not in done.stdout and "holds" in done.stdout
    version = subprocess.run([sys.executable, "-m", "evolute", "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"evolute {ev.__version__}\n"


def test_importing_evolute_does_not_import_the_command_line() -> None:
    code = "import sys, evolute; print({'typer', 'evolute.cli', 'evolute.verify'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
