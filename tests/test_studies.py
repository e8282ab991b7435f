"""Studies: what is finished stays finished, what fails is told, and the numbers are those that theory knows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from evolute import studies
from evolute.errors import StudyError
from evolute.studies import Cell, Config, Row, Study, Verdict
from evolute.studies.fits import exponent, slope
from evolute.studies.growth import Growth
from evolute.studies.settings import plain, restored


@dataclass(frozen=True)
class Squares(Config):
    """Numbers to square."""

    numbers: tuple[int, ...] = (1, 2, 3)
    label: str = "n"
    loud: bool = False
    sizes: tuple[float, ...] = (1.0,)


class SquaresStudy(Study[Squares]):
    """Squares, and a cell that fails if it is told to."""

    name = "squares"
    claim = "Squares are not negative."
    config = Squares
    measured: list[int]

    def __init__(self) -> None:
        self.measured, self.broken = [], set[int]()

    def cells(self, config: Squares) -> Sequence[Cell]:
        return [{"number": number} for number in config.numbers]

    def measure(self, cell: Cell) -> list[Row]:
        self.measured.append(cell["number"])
        if cell["number"] in self.broken:
            raise ValueError("too hard")
        return [{"number": cell["number"], "square": cell["number"] ** 2}]

    def table(self, config: Squares, rows: Sequence[Row]) -> list[Row]:
        return list(rows)

    def verdict(self, config: Squares, table: Sequence[Row]) -> Verdict:
        return Verdict("holds", f"{len(table)} squares.")

    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        return Figure()


@pytest.fixture
def squares() -> SquaresStudy:
    study = SquaresStudy()
    studies.add(study)
    return study


def test_rows_come_in_the_order_of_the_cells(squares: SquaresStudy) -> None:
    with ThreadPoolExecutor(3) as pool:
        result = studies.run("squares", Squares(numbers=(3, 1, 2)), executor=pool)
    assert [row["square"] for row in result.rows] == [9, 1, 4]
    assert result.verdict == Verdict("holds", "3 squares.") and result.cells == 3


def test_finished_cells_are_not_measured_again(squares: SquaresStudy, tmp_path: Path) -> None:
    squares.broken = {2}
    first = studies.run("squares", out=tmp_path, workers=0)
    assert [row["square"] for row in first.rows] == [1, 9]
    assert len(first.failed) == 1 and "too hard" in first.failed[0]
    squares.broken, squares.measured = set(), []
    second = studies.run("squares", out=tmp_path, workers=0)
    assert squares.measured == [2] and [row["square"] for row in second.rows] == [1, 4, 9] and not second.failed


def test_another_version_measures_anew(squares: SquaresStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    studies.run("squares", out=tmp_path, workers=0)
    monkeypatch.setattr("evolute.studies.cells.installed_version", lambda: "99.0")
    squares.measured = []
    studies.run("squares", out=tmp_path, workers=0)
    assert squares.measured == [1, 2, 3]


def test_the_verdict_says_of_how_many_cells_it_is(squares: SquaresStudy) -> None:
    squares.broken = {2}
    some = studies.run("squares", workers=0)
    assert some.verdict == Verdict("holds", "2 squares. Only 2 of 3 cells could be measured.")
    squares.broken = {1, 2}
    assert studies.run("squares", workers=0).verdict.answer == "undecided"


def test_a_cell_that_a_study_refuses_takes_no_other_with_it(
    squares: SquaresStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(cell: Cell) -> list[Row]:
        if cell["number"] == 2:
            raise StudyError("two is no good.")
        return [{"number": cell["number"], "square": 0}]

    monkeypatch.setattr(squares, "measure", refuse)
    result = studies.run("squares", workers=0)
    assert len(result.rows) == 2 and result.failed == ["{'number': 2}: two is no good."]


def test_nothing_is_measured_that_cannot_be_kept(squares: SquaresStudy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StudyError, match="cannot write"):
        studies.run("squares", out=tmp_path / "file", workers=0)
    assert not squares.measured


def test_a_value_that_is_set_twice_makes_no_second_repeat(squares: SquaresStudy) -> None:
    result = studies.run("squares", Squares(numbers=(2, 3, 2)), workers=0)
    assert squares.measured == [2, 3] and len(result.rows) == result.cells == 2


def test_an_interruption_loses_no_finished_cell(squares: SquaresStudy, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        studies.run("squares", out=tmp_path, workers=0, report=stop)
    assert len(list((tmp_path / "cells").iterdir())) == 2
    squares.measured = []
    assert len(studies.run("squares", out=tmp_path, workers=0).rows) == 3
    assert squares.measured == [3]


def test_results_are_read_back_as_they_were(squares: SquaresStudy, tmp_path: Path) -> None:
    result = studies.run("squares", workers=0)
    again = studies.Result.load(result.save(tmp_path))
    assert again == result and studies.Result.load(tmp_path) == result


def test_settings_have_the_types_of_their_fields() -> None:
    config = studies.configured(Squares, ["numbers=4, 5", "label=m", "loud=true", "seed=7"])
    assert config == Squares(seed=7, numbers=(4, 5), label="m", loud=True)
    assert restored(Squares, plain(config)) == config


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["numbrs=1"], "no setting 'numbrs'; did you mean 'numbers'?"),
        (["numbers=x"], "numbers: expected int values with commas between, got 'x'"),
        (["loud=yes"], "loud: expected bool, got 'yes'"),
        (["sizes=1,nan"], "sizes: expected float values with commas between, got '1,nan'"),
        (["sizes=inf"], "sizes: expected float values with commas between, got 'inf'"),
        (["seed"], "expected key=value, got 'seed'"),
    ],
)
def test_a_wrong_setting_is_named(pairs: list[str], message: str) -> None:
    with pytest.raises(StudyError) as error:
        studies.configured(Squares, pairs)
    assert message in str(error.value)


def test_what_cannot_be_run_or_read_says_why(squares: SquaresStudy, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="no study 'squars'; did you mean 'squares'"):
        studies.run("squars")
    with pytest.raises(StudyError, match="expected a Squares for the study 'squares', got Growth"):
        studies.run("squares", Growth())
    squares.broken = {1, 2, 3}
    with pytest.raises(StudyError, match=r"no cell of 'squares' could be measured: .*too hard"):
        studies.run("squares", workers=0)
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(StudyError, match="is no result of a study"):
        studies.Result.load(tmp_path)
    squares.broken = set()
    studies.run("squares", out=tmp_path, workers=0)
    cell = next((tmp_path / "cells").iterdir())
    whole = json.loads(cell.read_text())
    broken = [whole | {"rows": 5}, whole | {"rows": [5]}, {key: whole[key] for key in ("study", "cell")}, [1]]
    for text in ("half a cel", *map(json.dumps, broken)):
        cell.write_text(text)
        with pytest.raises(StudyError, match="is no finished cell"):
            studies.run("squares", out=tmp_path, workers=0)


def test_numbers_that_are_not_finite_are_not_saved(squares: SquaresStudy, tmp_path: Path) -> None:
    result = replace(studies.run("squares", workers=0), rows=[{"square": float("nan")}])
    with pytest.raises(StudyError, match="'squares' has numbers that are not finite"):
        result.save(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_an_exponent_has_students_interval() -> None:
    assert slope([1, 2, 4, 8], [5 * x**1.5 for x in (1, 2, 4, 8)]) == pytest.approx(1.5)
    fit = exponent([1, 2], [[1, 2], [1, 4], [1, 8]])  # slopes 1, 2, 3
    assert fit.value == pytest.approx(2)
    assert fit.high - fit.value == pytest.approx(4.302652729696142 / 3**0.5)
