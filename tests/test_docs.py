"""Every Python block of the README and the documentation runs alone, as it stands, and prints what the page says."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(\n*```text\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)(?P<target>[^)#]+)")


def blocks() -> Iterator[object]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            line = text.count("\n", 0, found.start("code"))
            name = f"{page.relative_to(ROOT)}:{line}"
            yield pytest.param(page, line, found["code"], found["output"], id=name, marks=pytest.mark.docs)


@pytest.mark.parametrize(("page", "line", "code", "output"), [*blocks()])
def test_block_runs_as_it_stands(
    page: Path,
    line: int,
    code: str,
    output: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    program = compile("\n" * line + code, str(page), "exec", dont_inherit=True)  # tracebacks name the line of the page
    exec(program, {"__name__": "__main__"})
    if output is not None:
        assert capsys.readouterr().out.rstrip() == output.rstrip()


def test_there_are_blocks_to_run() -> None:
    pages = {block.values[0] for block in blocks()}
    assert ROOT / "README.md" in pages
    assert len(pages) > 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(page: Path) -> None:
    for found in LINK.finditer(page.read_text(encoding="utf-8")):
        assert (page.parent / found["target"]).exists(), f"{page}: {found['target']} does not exist"
