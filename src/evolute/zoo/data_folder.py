"""Images of yours in a folder: every subfolder is a class, every file in it a sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evolute.errors import DataError
from evolute.zoo.data import Dataset, Samples, shuffled, split
from evolute.zoo.data_images import centred
from evolute.zoo.extras import extra

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")


def image_folder(
    folder: str | Path, size: int | None = None, *, channels: int = 3, test: float = 0.2, seed: int = 0
) -> Dataset:
    """Images as (channels, height, width) in [−1, 1]; `folder/cat/1.png` is of class 'cat', classes in sorted order.

    Pictures are read by Pillow, in grey for channels=1, in colour for 3, and made size × size if a size is given.
    Arrays (.npy) of shape (height, width) or (height, width, channels) need nothing to be installed: whole numbers are
    0 … 255, others 0 … 1, and their size is as it is.

    >>> image_folder("nowhere")
    Traceback (most recent call last):
    evolute.errors.DataError: 'nowhere' is not a folder; expected one with a subfolder of images for each class.
    """
    if channels not in (1, 3):
        raise DataError(f"expected channels 1 (grey) or 3 (colour), got {channels}.")
    files = _files(Path(folder))
    images = [_read(file, size, channels) for _, file in files]
    _check_sizes([file for _, file in files], images)
    labels = tuple(sorted({label for label, _ in files}))
    targets = torch.tensor([labels.index(label) for label, _ in files])
    train, rest = split(shuffled(Samples(torch.stack(images), targets), seed), test)
    name = f"image_folder({Path(folder).name}, size={size}, channels={channels}, test={test}, seed={seed})"
    return Dataset(name, train, rest, labels)


def _files(folder: Path) -> list[tuple[str, Path]]:
    """(class, file), in sorted order."""
    if not folder.is_dir():
        raise DataError(f"'{folder}' is not a folder; expected one with a subfolder of images for each class.")
    inner = sorted(each for each in folder.iterdir() if each.is_dir())
    known = (*PICTURES, ".npy")
    found = [(each.name, file) for each in inner for file in sorted(each.iterdir()) if file.suffix.lower() in known]
    if not found:
        raise DataError(f"no image in a subfolder of '{folder}'; expected folder/class/file with {', '.join(known)}.")
    return found


def _read(file: Path, size: int | None, channels: int) -> Tensor:
    pixels = _array(file) if file.suffix.lower() == ".npy" else _picture(file, size, channels)
    whole = np.issubdtype(pixels.dtype, np.integer)
    image = torch.from_numpy(pixels.astype(np.float32)) / (255 if whole else 1)
    image = image[..., None] if image.dim() == 2 else image
    if image.dim() != 3 or image.shape[-1] != channels:
        expected = f"(height, width, {channels})" + (" or (height, width)" if channels == 1 else "")
        raise DataError(f"'{file}' has shape {pixels.shape}, expected {expected}; channels={channels} was asked for.")
    return centred(image.permute(2, 0, 1))  # (H, W, C) → (C, H, W)


def _array(file: Path) -> Any:
    try:
        return np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as problem:
        raise DataError(f"'{file}' is not a NumPy array: {problem}.") from None


def _picture(file: Path, size: int | None, channels: int) -> Any:
    pillow = extra("PIL.Image", "pillow", "Folders of pictures")
    try:
        with pillow.open(file) as opened:
            picture = opened.convert("L" if channels == 1 else "RGB")
    except OSError as problem:
        raise DataError(f"'{file}' is not a picture that can be read: {problem}.") from None
    return np.asarray(picture if size is None else picture.resize((size, size)))


def _check_sizes(files: list[Path], images: list[Tensor]) -> None:
    for file, image in zip(files, images, strict=True):
        if image.shape != images[0].shape:
            first, other = (tuple(each.shape[1:]) for each in (images[0], image))
            raise DataError(
                f"expected images of one size: '{files[0]}' has {first}, '{file}' has {other}. Give size=… to make all "
                "pictures size × size; arrays (.npy) have to be of one size already."
            )
