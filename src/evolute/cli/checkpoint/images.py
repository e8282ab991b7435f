"""Images as batches, through the processor of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from evolute.cli.checkpoint.files import by_class, existing
from evolute.cli.checkpoint.source import Source, library, quiet
from evolute.cli.checkpoint.task import class_index
from evolute.cli.checkpoint.text import Batch, Shape
from evolute.cli.refusal import Refusal, first_sentence, refuse
from evolute.zoo.extras import extra

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


def images(source: Source, data: str, config: Any, shape: Shape, generator: torch.Generator) -> list[Batch]:
    """Pictures of folder/class/picture, drawn if there are more than asked for."""
    found = _files(data)
    index = class_index(sorted({label for label, _ in found}), config, source.where)
    processor = source.load(library().AutoImageProcessor, "the image processor")
    order = torch.randperm(len(found), generator=generator)[: shape.samples].tolist()
    parts = [[found[i] for i in order[k : k + shape.batch]] for k in range(0, len(order), shape.batch)]
    return [
        {
            "pixel_values": _pixels(processor, [file for _, file in part], config),
            "labels": torch.tensor([index[label] for label, _ in part]),
        }
        for part in parts
    ]


def _files(data: str) -> list[tuple[str, Path]]:
    expected = "a folder with a subfolder of pictures per class"
    place = existing(data, expected)
    found = by_class(place, ENDINGS) if place.is_dir() else []
    if not found:
        refuse(f"--data: '{data}' has no pictures in classes; expected {expected}")
    return found


def _pixels(processor: Any, files: list[Path], config: Any) -> torch.Tensor:
    pictures = [_picture(file, getattr(config, "num_channels", 3)) for file in files]
    with quiet():
        return processor(images=pictures, return_tensors="pt")["pixel_values"]


def _picture(file: Path, channels: int) -> Any:
    pillow = extra("PIL.Image", "pillow", "Pictures")
    try:
        with pillow.open(file) as opened:
            return opened.convert("L" if channels == 1 else "RGB")
    except OSError as problem:
        raise Refusal(f"'{file}' is not a picture that can be read: {first_sentence(problem)}") from problem
