"""Sums of two numbers, written out: `12345+54321=066666`."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from evolute.errors import DataError
from evolute.zoo.data import IGNORED, Dataset, Samples

SYMBOLS = tuple("0123456789+=")


def addition(train: int = 10_000, test: int = 1_000, *, digits: int = 5, seed: int = 0) -> Dataset:
    """`12345+54321=066666`: 12 symbols, 18 tokens; predict the next one, judged on the digits of the answer alone.

    Inputs are all tokens but the last, targets all but the first, with -100 up to the equals sign. No sum is drawn
    twice, so none that is tested was trained on.

    >>> data = addition(train=100, test=10)
    >>> text = data.decode(data.train.x[0])
    >>> text, data.decode(data.train.y[0])
    ('79217+31533=11075', '           110750')
    """
    _check(train, test, digits)
    pairs = random.Random(seed).sample(range(100**digits), train + test)
    tokens = torch.tensor([_tokens(*divmod(pair, 10**digits), digits) for pair in pairs])
    samples = Samples(tokens[:, :-1], _targets(tokens, answer=2 * digits + 2))
    name = f"addition(train={train}, test={test}, digits={digits}, seed={seed})"
    return Dataset(name, samples.first(train), Samples(samples.x[train:], samples.y[train:]), SYMBOLS)


def _tokens(a: int, b: int, digits: int) -> list[int]:
    text = f"{a:0{digits}}+{b:0{digits}}={a + b:0{digits + 1}}"
    return [SYMBOLS.index(symbol) for symbol in text]


def _targets(tokens: Tensor, answer: int) -> Tensor:
    """The token after each; -100 before the answer begins."""
    targets = tokens[:, 1:].clone()
    targets[:, : answer - 1] = IGNORED
    return targets


def _check(train: int, test: int, digits: int) -> None:
    if not 1 <= digits <= 9:
        raise DataError(f"expected numbers of 1 to 9 digits, got {digits}.")
    if train < 1 or test < 1 or train + test > 100**digits:
        raise DataError(
            f"there are {100**digits:,} sums of two numbers of {digits} digits; expected at least one to train and one "
            f"to test among them, got train={train} and test={test}."
        )
