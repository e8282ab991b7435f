"""Two sets of small images: handwritten digits, and Fashion-MNIST. Pixels are (channels, height, width) in [−1, 1]."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import torch
from torch import Tensor

from evolute.errors import DataError
from evolute.zoo.data import Dataset, Samples, shuffled, split
from evolute.zoo.extras import extra

FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
FASHION = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


def digits(*, test: float = 0.2, seed: int = 0) -> Dataset:
    """The 1797 handwritten digits of scikit-learn, 1×8×8 pixels, in 10 classes.

    >>> data = digits()
    >>> data.train.x.shape, data.classes
    (torch.Size([1438, 1, 8, 8]), 10)
    """
    loaded = extra("sklearn.datasets", "scikit-learn", "The handwritten digits").load_digits()
    pixels = torch.tensor(loaded.images, dtype=torch.float32) / 16  # they come as 0 … 16
    samples = Samples(centred(pixels)[:, None], torch.tensor(loaded.target))
    train, rest = split(shuffled(samples, seed), test)
    return Dataset(f"digits(test={test}, seed={seed})", train, rest, tuple("0123456789"))


def fashion_mnist(folder: str | Path = FASHION_FOLDER, *, seed: int = 0) -> Dataset:
    """Zalando's articles of clothing, 1×28×28 pixels, in 10 classes: 60,000 to train, 10,000 to test.

    The four IDX files, with or without .gz, are in `folder`; the seed decides the order of those to train on.

    >>> fashion_mnist("nowhere")
    Traceback (most recent call last):
    evolute.errors.DataError: no Fashion-MNIST in 'nowhere': 'train-images-idx3-ubyte.gz' is not there. Install ...
    """
    train, test = (_fashion_part(Path(folder), part) for part in ("train", "t10k"))
    return Dataset(f"fashion_mnist(seed={seed})", shuffled(train, seed), test, FASHION)


def centred(pixels: Tensor) -> Tensor:
    """From [0, 1] to [−1, 1]."""
    return pixels * 2 - 1


def _fashion_part(folder: Path, part: str) -> Samples:
    images = read_idx(_idx_file(folder, f"{part}-images-idx3-ubyte"))
    labels = read_idx(_idx_file(folder, f"{part}-labels-idx1-ubyte"))
    return Samples(centred(images.float() / 255)[:, None], labels.long())


def _idx_file(folder: Path, name: str) -> Path:
    for file in (folder / f"{name}.gz", folder / name):
        if file.is_file():
            return file
    raise DataError(
        f"no Fashion-MNIST in '{folder}': '{name}.gz' is not there. Install the Debian package "
        "dataset-fashion-mnist (apt install dataset-fashion-mnist), or give the folder of the four IDX files: "
        "zoo.fashion_mnist(folder)."
    )


def read_idx(file: Path) -> Tensor:
    """An IDX file of bytes: 0, 0, the type 8, the number of axes, their sizes as big-endian 32-bit, the entries."""
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError) as problem:
        raise DataError(f"'{file}' cannot be read: {problem}.") from None
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise DataError(f"'{file}' is not an IDX file of bytes: it begins with {raw[:4].hex(' ')}, not 00 00 08.")
    start = 4 + 4 * raw[3]
    shape = struct.unpack(f">{raw[3]}I", raw[4:start])
    entries = torch.frombuffer(bytearray(raw), dtype=torch.uint8)[start:]
    if entries.numel() != torch.Size(shape).numel():
        raise DataError(f"'{file}' is cut off: {entries.numel():,} entries, but its header says {shape}.")
    return entries.reshape(shape)
