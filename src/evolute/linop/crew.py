"""Threads of one core each: thousands of small operations cost less so than each of them on all cores."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Lock, local
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
AHEAD = 64  # tasks that may wait for each thread: enough to do while the next ones are prepared

_one_at_a_time = Lock()


class Crew(Generic[T]):
    """Runs tasks on threads that hold some memory each, made by `equip`; in this thread if there is only one core."""

    def __init__(self, equip: Callable[[], T], pool: ThreadPoolExecutor | None, width: int) -> None:
        self._equip, self._pool, self._width = equip, pool, width
        self._own = local()
        self._running = set[Future[None]]()

    def run(self, tasks: Iterable[Callable[[T], None]]) -> None:
        """Starts them; `finish` waits. What one of them raises is raised here."""
        for task in tasks:
            if self._pool is None:
                task(self._equipment)
            else:
                self._running.add(self._pool.submit(self._one, task, torch.is_inference_mode_enabled()))
                if len(self._running) >= AHEAD * self._width:
                    self._collect(FIRST_COMPLETED)

    def finish(self) -> None:
        while self._running:
            self._collect(FIRST_COMPLETED)

    def _collect(self, when: str) -> None:
        done, self._running = wait(self._running, return_when=when)
        for future in done:
            future.result()

    def _one(self, task: Callable[[T], None], inference: bool) -> None:
        with torch.inference_mode() if inference else torch.no_grad():  # both are each thread's own
            task(self._equipment)

    @property
    def _equipment(self) -> T:
        if not hasattr(self._own, "it"):
            self._own.it = self._equip()
        return self._own.it


@contextmanager
def crew(equip: Callable[[], T], device: torch.device) -> Generator[Crew[T]]:
    """As many threads as torch has for one operation, each of which then runs on one core; all done at the end."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or not _one_at_a_time.acquire(blocking=False):
        yield Crew(equip, None, 1)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="evolute")
    torch.set_num_threads(1)
    try:
        members = Crew(equip, pool, threads)
        yield members
        members.finish()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
        _one_at_a_time.release()
