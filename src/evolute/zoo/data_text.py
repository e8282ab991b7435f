"""Text as windows of characters or bytes; the task is the next one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from evolute.errors import DataError
from evolute.zoo.config import check_choice
from evolute.zoo.data import Dataset, Samples, shuffled, split

Paths = str | Path | Iterable[str | Path]
BYTES = tuple(chr(value) for value in range(256))


def english(length: int = 64, *, test: float = 0.1, seed: int = 0) -> Dataset:
    """English prose that comes with Python (`pydoc_data.topics`), by characters: 465,000, of 103 kinds, in Python 3.11.

    >>> data = english(length=32)
    >>> data.length, data.vocabulary > 90
    (32, True)
    """
    from pydoc_data.topics import topics

    prose = "\n".join(topics[name] for name in sorted(topics))
    return _dataset(f"english(length={length}, test={test}, seed={seed})", prose, length, test, seed)


def text(
    paths: Paths,
    length: int = 64,
    *,
    level: Literal["character", "byte"] = "character",
    encoding: str = "utf-8",
    test: float = 0.1,
    seed: int = 0,
) -> Dataset:
    """Text files of yours: one, several, or all `*.txt` below a folder, in the order of their names.

    Windows of `length` tokens do not overlap. The last part of the text is for testing; the seed decides the order of
    the windows to train on.

    >>> import pydoc_data.topics
    >>> text(pydoc_data.topics.__file__, length=128, level="byte").vocabulary
    256
    """
    check_choice("level", level, ("character", "byte"))
    files = _files(paths)
    content = "\n".join(_read(file, "latin-1" if level == "byte" else encoding) for file in files)
    labels = BYTES if level == "byte" else None
    name = f"text({', '.join(file.name for file in files)}; length={length}, {level}, test={test}, seed={seed})"
    return _dataset(name, content, length, test, seed, labels)


# ---------------------------------------------------------------- from text to windows


def _dataset(
    name: str, content: str, length: int, test: float, seed: int, labels: tuple[str, ...] | None = None
) -> Dataset:
    labels = labels or tuple(sorted(set(content)))
    train, rest = split(_windows(_encode(content, labels), length), test)
    return Dataset(name, shuffled(train, seed), rest, labels)


def _encode(content: str, labels: tuple[str, ...]) -> Tensor:
    index = {symbol: i for i, symbol in enumerate(labels)}
    return torch.tensor([index[symbol] for symbol in content])


def _windows(tokens: Tensor, length: int) -> Samples:
    """Inputs next to one another; targets are the same, one token later."""
    if length < 1 or len(tokens) < 2 * length + 1:
        raise DataError(
            "expected windows of one token or more, and a text of two windows (to train and to test) and one token; "
            f"got length={length} and {len(tokens):,} tokens. Use a shorter length or more text."
        )
    count = (len(tokens) - 1) // length
    inputs, targets = tokens[: count * length], tokens[1 : count * length + 1]
    return Samples(inputs.reshape(count, length), targets.reshape(count, length))


# ---------------------------------------------------------------- from files to text


def _files(paths: Paths) -> list[Path]:
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    files = [file for path in given for file in _expanded(Path(path))]
    if not files:
        raise DataError("expected the path of a text file or of a folder, or several of them; got none.")
    return files


def _expanded(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"'{path}' does not exist (from {Path.cwd()}); expected a text file or a folder of *.txt.")
    if path.is_file():
        return [path]
    found = sorted(path.rglob("*.txt"))
    if not found:
        raise DataError(f"no *.txt below the folder '{path}'; files with other names can be given one by one.")
    return found


def _read(file: Path, encoding: str) -> str:
    try:
        content = file.read_bytes().decode(encoding)
    except UnicodeDecodeError as problem:
        raise DataError(
            f"'{file}' is not {encoding} text ({problem.reason} at byte {problem.start}); "
            "give its encoding=…, or read it with level='byte'."
        ) from None
    except (OSError, LookupError) as problem:
        raise DataError(f"'{file}' cannot be read: {problem}.") from None
    if not content:
        raise DataError(f"'{file}' is empty; expected text.")
    return content
