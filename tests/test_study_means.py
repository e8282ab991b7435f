"""Means of repeats: Student's interval, and none for a single repeat."""

import math

import pytest

from evolute.errors import StudyError
from evolute.studies.means import geometric_mean, mean


def test_the_interval_is_students() -> None:
    m = mean([1.0, 2.0, 3.0])
    assert (m.value, m.high - m.value, m.value - m.low) == pytest.approx((2, 4.302652729696142 / 3**0.5, 2.484137711))


def test_a_geometric_mean_is_the_mean_of_logarithms() -> None:
    values = [0.1, 3.0, 20.0]
    logs, g = mean([math.log(value) for value in values]), geometric_mean(values)
    assert (math.log(g.value), math.log(g.low), math.log(g.high)) == pytest.approx((logs.value, logs.low, logs.high))


def test_one_repeat_has_no_interval() -> None:
    with pytest.raises(StudyError, match="takes two repeats or more, got 1"):
        mean([1.0])
