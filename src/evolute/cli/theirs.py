"""What raises in code of the user's is told in one sentence: what, and in which of their lines.

With EVOLUTE_TRACEBACK=1 the traceback is shown too.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary

import evolute
from evolute.cli.refusal import refuse
from evolute.errors import EvoluteError

SWITCH = "EVOLUTE_TRACEBACK"
LONGEST = 300  # characters of a message
OURS = Path(evolute.__file__).parent
INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def traceback_wanted() -> bool:
    return os.environ.get(SWITCH, "0") not in ("", "0")


@contextmanager
def theirs(what: str) -> Generator[None]:
    """All that raises in here is theirs, whoever was called: torch, by a model of theirs."""
    with _told(what, lambda frames: True):
        yield


@contextmanager
def perhaps_theirs(what: str) -> Generator[None]:
    """What raises in here is theirs if it went through a line of theirs; else it is a bug of ours, and stays one."""
    with _told(what, lambda frames: any(map(_their_own, frames))):
        yield


@contextmanager
def _told(what: str, blamed: Callable[[Sequence[FrameSummary]], bool]) -> Generator[None]:
    try:
        yield
    except EvoluteError:
        raise
    except (Exception, SystemExit) as problem:
        frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if not _ours(frame)]
        if not blamed(frames):
            raise
        refuse(f"{what} raised {_message(problem)}{_place(problem, frames)}; {SWITCH}=1 shows the traceback")


def _message(problem: BaseException) -> str:
    told = problem.msg if isinstance(problem, SyntaxError) else str(problem)
    told = " ".join(told.split()).rstrip(".")
    told = f"{told[:LONGEST]}…" if len(told) > LONGEST else told
    return f"{type(problem).__name__}: {told}" if told else type(problem).__name__


def _place(problem: BaseException, frames: Sequence[FrameSummary]) -> str:
    """The innermost line of theirs; where there is none, of what they called."""
    if isinstance(problem, SyntaxError) and problem.filename:
        return f" ({_short(problem.filename)}, line {problem.lineno})"
    frame = next((each for each in [*filter(_their_own, frames)][::-1]), frames[-1] if frames else None)
    if frame is None:
        return ""
    function = "" if frame.name.startswith("<") else f", in {frame.name}"
    return f" ({_short(frame.filename)}, line {frame.lineno}{function})"


def _short(file: str) -> str:
    """From here, or from where packages are installed."""
    for start in (Path.cwd(), *INSTALLED[2:]):
        if Path(file).is_relative_to(start):
            return str(Path(file).relative_to(start))
    return file


def _ours(frame: FrameSummary) -> bool:
    return frame.filename.startswith("<") or Path(frame.filename).is_relative_to(OURS)


def _their_own(frame: FrameSummary) -> bool:
    return not any(Path(frame.filename).is_relative_to(folder) for folder in INSTALLED)
