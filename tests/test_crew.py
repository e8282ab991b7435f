"""Threads of one core each: the same results, errors that arrive, and torch's threads as they were."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import evolute as ev
from evolute.linop.crew import AHEAD, crew
from evolute.zoo import Block, BlockConfig

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_every_task_runs_once_on_a_thread_of_its_own_memory() -> None:
    seen, out = list[tuple[int, int]](), torch.zeros(AHEAD * 5)

    def task(memory: list[int], i: int) -> None:
        memory.append(i)
        seen.append((threading.get_ident(), id(memory)))
        out[i] += i

    with crew(list[int], CPU) as members:
        assert torch.get_num_threads() == 1
        members.run(lambda memory, i=i: task(memory, i) for i in range(len(out)))
    assert torch.equal(out, torch.arange(len(out), dtype=out.dtype))
    threads = {thread for thread, _ in seen}
    assert threading.get_ident() not in threads and len(threads) == len(set(seen)) <= 2


@pytest.mark.usefixtures("two_threads")
def test_what_a_task_raises_is_raised_here() -> None:
    def fail(_: None) -> None:
        raise ValueError("too hard")

    with pytest.raises(ValueError, match="too hard"), crew(lambda: None, CPU) as members:
        members.run([fail])


@pytest.mark.usefixtures("two_threads")
def test_a_crew_in_a_crew_works_in_its_own_thread() -> None:
    with crew(lambda: None, CPU), crew(threading.get_ident, CPU) as inner:
        found = list[int]()
        inner.run([found.append])
    assert found == [threading.get_ident()]


def matrix() -> Tensor:
    torch.manual_seed(0)
    layer = Block(BlockConfig(width=8, heads=2, hidden=24, bias=True)).double()
    x, y = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    return ev.to_dense(ev.closed_form(layer, x, y))


@pytest.mark.usefixtures("two_threads")
def test_a_dense_closed_form_is_the_same_on_any_number_of_threads() -> None:
    both = matrix()
    with torch.inference_mode():
        assert torch.equal(matrix(), both)
    torch.set_num_threads(1)
    assert torch.allclose(matrix(), both, rtol=1e-13, atol=1e-15)
    torch.set_num_threads(2)
