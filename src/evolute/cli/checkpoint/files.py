"""Text and labelled files, as they lie on disk."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from evolute.cli.refusal import refuse

MOST_CHARACTERS = 4_000_000  # more than any report looks at
Labelled = list[tuple[str, str]]  # (text, class)


def prose(data: str) -> str:
    """The text of a file, of all *.txt and *.md below a folder in the order of their names, or `english`."""
    if data == "english" and not Path(data).exists():
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    place = existing(data, "a text file, a folder of *.txt, or english")
    files = sorted(f for f in place.rglob("*") if f.suffix in (".txt", ".md")) if place.is_dir() else [place]
    content, size = list[str](), 0
    for file in files:
        content.append(read(file))
        size += len(content[-1])
        if size > MOST_CHARACTERS:
            break
    if not size or not "".join(content).strip():
        refuse(f"'{data}' has no text in it" + ("; expected *.txt or *.md below it" if place.is_dir() else ""))
    return "\n".join(content)[:MOST_CHARACTERS]


def existing(data: str, expected: str) -> Path:
    place = Path(data).expanduser()
    if not place.exists():
        refuse(f"--data: there is no '{data}'; expected {expected}")
    return place


def read(file: Path) -> str:
    """UTF-8 text; anything else is not guessed at."""
    try:
        content = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as problem:
        refuse(f"'{file}' is not text in UTF-8: byte {problem.start} cannot be read")
    except OSError as problem:
        refuse(f"'{file}' cannot be read: {problem.strerror}")
    if "\0" in content:
        refuse(f"'{file}' is not text: it has zero bytes in it")
    return content


def labelled(data: str) -> Labelled:
    """Pairs of text and class: folder/class/*.txt, or a .csv, .tsv or .jsonl with columns text and label."""
    expected = "a folder with a subfolder of *.txt per class, or a .csv, .tsv or .jsonl with columns text and label"
    place = existing(data, expected)
    if place.is_dir():
        found = [(read(file), label) for label, file in by_class(place, (".txt",))]
    elif place.suffix in (".csv", ".tsv", ".jsonl"):
        found = _rows(place)
    else:
        refuse(f"--data: '{data}' has no classes; expected {expected}")
    if not found:
        refuse(f"--data: '{data}' has nothing in it; expected {expected}")
    return found


def by_class(folder: Path, endings: Sequence[str]) -> list[tuple[str, Path]]:
    """(class, file) for folder/class/file, in sorted order."""
    inner = sorted(each for each in folder.iterdir() if each.is_dir())
    return [(each.name, file) for each in inner for file in sorted(each.iterdir()) if file.suffix.lower() in endings]


def _rows(file: Path) -> Labelled:
    lines = read(file).splitlines()
    try:
        if file.suffix == ".jsonl":
            rows = [cast("dict[str, Any]", json.loads(line)) for line in lines if line.strip()]
        else:
            rows = list(csv.DictReader(lines, delimiter="\t" if file.suffix == ".tsv" else ","))
        return [(str(row["text"]), str(row["label"])) for row in rows]
    except (ValueError, KeyError, TypeError, csv.Error):
        refuse(f"'{file}' cannot be read: every row needs a text and a label, in columns of these names")
