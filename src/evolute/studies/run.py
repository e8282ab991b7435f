"""Running a study: what is finished is read, the rest is measured, and nothing that is finished is ever lost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from evolute.errors import StudyError
from evolute.studies.cells import CellStore
from evolute.studies.executors import Executor, Here, Pending, finished, left_over, processes
from evolute.studies.registry import find
from evolute.studies.result import Result, provenance
from evolute.studies.settings import plain
from evolute.studies.study import Cell, Config, Row, Study, Verdict

Report = Callable[[int, int], None]  # cells done, cells in all
Pool = AbstractContextManager[Executor]


def run(
    study: str | Study[Any],
    config: Config | None = None,
    *,
    out: str | Path | None = None,
    executor: Executor | None = None,
    workers: int | None = None,
    report: Report | None = None,
) -> Result:
    """Measures every cell that is not finished yet, and says what all of them say.

    Args:
        study: its name, as `evolute study --list` shows it.
        config: the default one, if not given.
        out: a folder where finished cells are kept; run again with the same folder, and they are not measured again.
        executor: anything with `submit`, such as a pool of concurrent.futures; processes if not given.
        workers: how many processes; 0 runs in this one.
        report: called with the number of cells done, and of all, whenever one is done.
    """
    study = find(study) if isinstance(study, str) else study
    chosen: Config = study.config() if config is None else config
    if not isinstance(chosen, study.config):
        wanted, came = study.config.__name__, type(chosen).__name__
        raise StudyError(f"expected a {wanted} for the study '{study.name}', got {came}.")
    begin, cells = time.perf_counter(), _once(study.cells(chosen))
    store = CellStore(study.name, None if out is None else Path(out))
    store.prepare()
    rows, failed = _measured(study, cells, store, _executor(executor, workers, len(cells)), report)
    if not rows:
        raise StudyError(f"no cell of '{study.name}' could be measured: {failed[0] if failed else 'there are none'}.")
    table = study.table(chosen, rows)
    return Result(
        study.name,
        study.claim,
        plain(chosen),
        table,
        _of_part(study.verdict(chosen, table), len(cells) - len(failed), len(cells)),
        len(cells),
        failed,
        time.perf_counter() - begin,
        provenance(),
    )


def _of_part(verdict: Verdict, measured: int, cells: int) -> Verdict:
    """What is missing belongs to the verdict; of less than half of the cells there is none."""
    if measured == cells:
        return verdict
    answer = verdict.answer if 2 * measured >= cells else "undecided"
    return Verdict(answer, f"{verdict.sentence} Only {measured} of {cells} cells could be measured.")


def _once(cells: Iterable[Cell]) -> list[Cell]:
    """A value that is set twice makes no repeat: the same cell measured again would only narrow an interval."""
    return list({json.dumps(cell, sort_keys=True): cell for cell in cells}.values())


def _executor(given: Executor | None, workers: int | None, cells: int) -> Pool:
    if given is not None:
        return nullcontext(given)
    return nullcontext(Here()) if workers == 0 or cells <= 1 else processes(workers)


def _measured(
    study: Study[Any],
    cells: list[Cell],
    store: CellStore,
    executor: AbstractContextManager[Executor],
    report: Report | None,
) -> tuple[list[Row], list[str]]:
    """The rows of all cells in the order of the cells, and what went wrong."""
    known = {i: rows for i, cell in enumerate(cells) if (rows := store.load(cell)) is not None}
    missing, failed = [i for i in range(len(cells)) if i not in known], list[str]()
    tell = report or (lambda done, total: None)
    tell(len(known), len(cells))
    places = {id(cells[i]): i for i in missing}
    wanted = [cells[i] for i in missing]
    with (
        _kept(store) as pending,
        executor if missing else nullcontext(Here()) as pool,
        closing(finished(pool, study.name, wanted, pending)) as outcomes,
    ):
        for cell, outcome in outcomes:
            if isinstance(outcome, Exception):
                failed.append(f"{cell}: {_said(outcome)}")
            else:
                store.save(cell, outcome)
                known[places[id(cell)]] = outcome
            tell(len(known) + len(failed), len(cells))
    return [row for i in sorted(known) for row in known[i]], failed


def _said(error: Exception) -> str:
    """What is ours is a sentence already."""
    return str(error) if isinstance(error, StudyError) else f"{type(error).__name__}: {error}"


@contextmanager
def _kept(store: CellStore) -> Generator[Pending]:
    """What is finished by the time an interruption has come through is kept, too."""
    pending: Pending = []
    try:
        yield pending
    except BaseException:
        for cell, rows in left_over(pending):
            store.save(cell, rows)
        raise
