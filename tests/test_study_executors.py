"""Sweeps on any executor: threads, processes, a Dask client as it is; one thread each, and nothing finished is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client
from matplotlib.figure import Figure

from evolute import studies
from evolute.studies import Cell, Config, Row, Study, Verdict
from evolute.studies.executors import processes
from evolute.studies.growth import Growth

GROWTH = Growth(models=("mlp",), depths=(1,), sigmas=(0.01, 0.1), width=8, sequences=2, repeats=2)


@dataclass(frozen=True)
class Slow(Config):
    """How many cells."""

    count: int = 4


class SlowStudy(Study[Slow]):
    """Cells that may fail, and that may all wait until the last of them has begun."""

    name = "slow"
    claim = "Slow cells are finished."
    config = Slow

    measured: list[int]

    def __init__(self, gate: threading.Barrier | None = None, pause: float = 0.0) -> None:
        self.measured, self.broken, self.gate, self.pause = [], set[int](), gate, pause

    def cells(self, config: Slow) -> Sequence[Cell]:
        return [{"number": number} for number in range(config.count)]

    def measure(self, cell: Cell) -> list[Row]:
        self.measured.append(cell["number"])
        if cell["number"] in self.broken:
            raise ValueError("too hard")
        if self.gate is not None:
            self.gate.wait(20)
        time.sleep(self.pause)
        return [{"number": cell["number"], "threads": torch.get_num_threads()}]

    def table(self, config: Slow, rows: Sequence[Row]) -> list[Row]:
        return list(rows)

    def verdict(self, config: Slow, table: Sequence[Row]) -> Verdict:
        return Verdict("holds", f"{len(table)} cells.")

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        return Figure()


def registered(study: SlowStudy) -> SlowStudy:
    studies.add(study)
    return study


def saved(folder: Path) -> int:
    return len(list((folder / "cells").iterdir()))


@pytest.fixture(scope="module")
def client() -> Generator[Client]:
    with Client(processes=False, n_workers=1, threads_per_worker=2, dashboard_address=None) as client:
        yield client


def test_a_dask_client_is_an_executor_as_it_is(client: Client, tmp_path: Path) -> None:
    there = studies.run("growth", GROWTH, executor=client, out=tmp_path)
    here = studies.run("growth", GROWTH, workers=0)
    assert there.rows == here.rows and saved(tmp_path) == there.cells == 4


def test_a_cell_that_fails_on_a_dask_client_is_named_and_tried_again(client: Client, tmp_path: Path) -> None:
    study = registered(SlowStudy())
    study.broken = {2}
    first = studies.run("slow", executor=client, out=tmp_path)
    assert [row["number"] for row in first.rows] == [0, 1, 3]
    assert len(first.failed) == 1 and "ValueError: too hard" in first.failed[0]
    study.broken, study.measured = set(), []
    second = studies.run("slow", executor=client, out=tmp_path)
    assert [row["number"] for row in second.rows] == [0, 1, 2, 3] and study.measured == [2]


@pytest.mark.parametrize("kind", ["threads", "dask"])
def test_cells_that_are_finished_at_an_interruption_are_kept(kind: str, client: Client, tmp_path: Path) -> None:
    """Two cells end together; the interruption comes while the first of them is reported."""
    study = registered(SlowStudy(threading.Barrier(2)))

    def stop(done: int, total: int) -> None:
        if done:
            time.sleep(0.5)  # the other one is ready by now
            raise KeyboardInterrupt

    with ThreadPoolExecutor(2) as pool, pytest.raises(KeyboardInterrupt):
        studies.run("slow", Slow(count=2), executor=client if kind == "dask" else pool, out=tmp_path, report=stop)
    assert saved(tmp_path) == 2
    study.measured = []
    assert len(studies.run("slow", Slow(count=2), out=tmp_path, workers=0).rows) == 2 and study.measured == []


def test_what_has_not_begun_at_an_interruption_never_begins() -> None:
    study = registered(SlowStudy(pause=0.1))

    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
        studies.run("slow", Slow(count=50), executor=pool, report=stop)
    assert len(study.measured) < 50


def test_processes_have_one_thread_and_leave_ctrl_c_to_the_one_that_asked() -> None:
    with processes(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 1
        assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN


@pytest.mark.slow
def test_ctrl_c_on_the_command_line_is_quiet_and_the_same_command_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "evolute", "study", "growth", "--workers", "1", "--out", str(tmp_path)]
    command += [x for s in ("models=pre_norm", "depths=1", "width=16", "repeats=3") for x in ("--set", s)]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs are deaf to it
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0, preexec_fn=heard
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "cells").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to the workers, too
    out, err = process.communicate(timeout=60)
    assert process.returncode != 0 and "Traceback" not in out + err
    assert "The same command goes on" in out + err
    before = saved(tmp_path)
    assert 0 < before < 21
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0
    assert saved(tmp_path) == 21


def test_results_can_be_read_by_those_whom_the_umask_lets(tmp_path: Path) -> None:
    registered(SlowStudy())
    studies.run("slow", out=tmp_path, workers=0).save(tmp_path)
    (tmp_path / "plain").touch()
    allowed = (tmp_path / "plain").stat().st_mode
    files = [tmp_path / "result.json", *(tmp_path / "cells").iterdir()]
    assert len(files) == 5 and all(path.stat().st_mode == allowed for path in files)
