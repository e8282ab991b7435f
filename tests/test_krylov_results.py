"""Results are saved and come back; progress is seen on a terminal only, and only when the work is long."""

import io
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import evolute as ev
from evolute import krylov
from evolute.krylov import progress
from evolute.krylov.results import Quantity, quantile
from evolute.krylov.storage import write
from krylov_cases import D, flat, hidden, matrix, outliers

OP = hidden(outliers())
RESULTS: dict[str, Any] = {
    "eigsh": lambda: ev.eigsh(OP, k=2, vectors=True),
    "spectrum": lambda: ev.spectrum(OP, 3, 10),
    "spectra": lambda: ev.spectrum([OP, hidden(flat())], 3, 10),
    "trace": lambda: ev.trace(OP, 16),
    "one sample": lambda: ev.diagonal(OP, 1),
    "block norms": lambda: ev.block_norms(OP, {"a": ev.Part("v", 0, 0, 200), "b": ev.Part("v", 0, 200, 400)}),
    "solve": lambda: ev.solve(OP, torch.ones(400, dtype=D), damping=5.0),
}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(_same(getattr(a, n), getattr(b, n)) for n in a.__dataclass_fields__)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[n], b[n]) for n in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b or (a != a and b != b)


@pytest.mark.parametrize("name", RESULTS)
def test_what_is_saved_comes_back(name: str, tmp_path: Path) -> None:
    result = RESULTS[name]()
    path = result.save(tmp_path / "answer")
    assert path == tmp_path / "answer.json"
    assert _same(krylov.Result.load(path), result)
    assert _same(type(result).load(tmp_path / "answer"), result)
    text = path.read_text("utf-8")
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert str(result)
    assert result.method in str(result)


def test_results_that_are_damaged_or_of_another_kind(tmp_path: Path) -> None:
    path = ev.eigsh(OP, k=2).save(tmp_path / "answer")
    with pytest.raises(ev.CheckpointError, match="holds a Eigenpairs, expected a Spectrum"):
        krylov.Spectrum.load(path)
    (tmp_path / "answer.safetensors").write_bytes(b"other")
    with pytest.raises(ev.CheckpointError, match=r"^'\S*' is not the file that was saved with"):
        krylov.Eigenpairs.load(path)
    path.write_text("{")
    with pytest.raises(ev.CheckpointError, match="is no saved result of evolute"):
        krylov.Eigenpairs.load(path)
    with pytest.raises(ev.CheckpointError, match="is no saved result of evolute"):
        krylov.Eigenpairs.load(tmp_path / "nothing")


def test_nothing_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "file", b"old")

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path / "file", b"new")
    assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [("file", b"old")]


def test_provenance() -> None:
    result = ev.trace(OP, 16, generator=torch.Generator().manual_seed(5))
    assert result.provenance.seed == 5
    assert result.provenance.evolute == ev.__version__
    assert "400×400" in result.provenance.operator
    assert ev.trace(ev.from_dense(torch.eye(3))).provenance.seed is None


def test_intervals() -> None:
    exact = Quantity(estimate=2.0, standard_error=0.0, samples=0, solver_error=0.5)
    assert exact.interval() == (1.5, 2.5)
    assert float(exact) == 2.0
    assert str(exact) == "2 (exact)"
    one = Quantity(estimate=2.0, standard_error=math.inf, samples=1, solver_error=0.0)
    assert one.interval() == (-math.inf, math.inf)
    norm = Quantity(estimate=2.0, standard_error=0.5, samples=8, solver_error=0.0, positive=True)
    low, high = norm.interval()
    assert low > 0
    assert low * high == pytest.approx(4)
    assert quantile(0.99, 8) == pytest.approx(3.4995, abs=1e-3)
    with pytest.raises(ValueError, match="a level between 0 and 1"):
        norm.interval(99)


# ---------------------------------------------------------------- progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _drawn(monkeypatch: pytest.MonkeyPatch, file: io.StringIO, **options: Any) -> str:
    terminal = isinstance(file, _Terminal)
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=file, force_terminal=terminal, width=120))
    ev.eigsh(OP, k=2, **options)
    return file.getvalue()


def test_progress_on_a_terminal_when_the_work_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _drawn(monkeypatch, _Terminal()) == "", "short work is silent"
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    seen = _drawn(monkeypatch, _Terminal())
    assert "eigenvalues" in seen
    assert "products" in seen
    assert _drawn(monkeypatch, _Terminal(), progress=False) == ""
    assert _drawn(monkeypatch, io.StringIO()) == "", "no terminal, no line"


def test_other_threads_may_work_too() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ev.eigsh(matrix(torch.diag(outliers())), k=1)))
    thread.start()
    thread.join()
    assert found[0].status == "converged"


def test_a_result_makes_its_folder_or_says_why_not(tmp_path: Path) -> None:
    result = ev.trace(ev.from_dense(torch.eye(2, dtype=torch.float64)))
    assert result.save(tmp_path / "new" / "folder" / "trace").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ev.CheckpointError, match=r"cannot write '.*trace.json'"):
        result.save(tmp_path / "file" / "trace")
