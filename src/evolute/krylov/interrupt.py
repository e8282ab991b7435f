"""Ctrl-C, once: stop at the next good place and say what is known. Twice: stop at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """`asked` once Ctrl-C has been pressed inside of the `with`; a second time raises KeyboardInterrupt.

    Only the main thread hears signals: elsewhere nothing is changed.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
