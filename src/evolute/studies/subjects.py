"""A model of the zoo at points of its training, on a fixed sample of its data: the same for the same seed.

>>> subject = Subject("mlp_digits", width=4, layers=1, steps=20, samples=16)
>>> for moment in moments(subject, [0, 20]):
...     print(moment.step, moment.objective, moment.objective.value() < 2.2)
0 Objective(MLP, 1,210 parameters, torch.float64) False
20 Objective(MLP, 1,210 parameters, torch.float64) True
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from evolute.engine.loss import Loss
from evolute.engine.objective import Objective
from evolute.errors import StudyError
from evolute.studies.tasks import ADVERSARIAL, CONTRASTIVE, LABELS, Task
from evolute.zoo import (
    GPT,
    MLP,
    Dataset,
    LinearRecurrent,
    Score,
    StateSpace,
    ViT,
    addition,
    digits,
    english,
    evaluate,
    fashion_mnist,
)
from evolute.zoo.data_images import FASHION_FOLDER
from evolute.zoo.trained import one_thread
from evolute.zoo.training import train

TESTED = 1000  # test samples that a score is taken on, at most


@dataclass(frozen=True)
class Subject:
    """A model by name (`NAMES`), how it is trained, and how many training samples its curvature is taken on.

    `layers` are blocks of a Transformer, or hidden layers of an MLP, which are as wide as a block's: 4·width. `options`
    are those of the blocks, such as {"norm": "post"}. As JSON it is `dataclasses.asdict(subject)`.
    """

    name: str
    width: int = 32
    heads: int = 2
    layers: int = 2
    steps: int = 400
    batch: int = 64
    optimizer: str = "adamw"
    lr: float = 3e-3
    schedule: str = "warmup_cosine"
    samples: int = 64
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            near = difflib.get_close_matches(self.name, NAMES, n=2)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(NAMES)}."
            raise StudyError(f"no model {self.name!r} to study; {hint}")
        if self.options and self.name.startswith("mlp"):
            raise StudyError(f"an MLP has no options of a Transformer block, got {dict(self.options)!r}.")

    @property
    def points(self) -> dict[str, int]:
        """Names of three steps: before training, after a tenth of it, after all of it.

        >>> Subject("gpt_english", steps=300).points
        {'initialisation': 0, 'early': 30, 'trained': 300}
        """
        return {"initialisation": 0, "early": max(1, self.steps // 10), "trained": self.steps}


@dataclass(frozen=True, eq=False)
class Moment:
    """The model after so many steps, in float64, and its loss on the sample; nothing of it changes any more.

    The sample is (x, y), or what the task of the subject makes of it and holds fixed.
    """

    step: int
    model: nn.Module
    sample: tuple[Tensor, Tensor]
    objective: Objective
    data: Dataset

    def score(self) -> Score:
        """Loss and accuracy on test samples."""
        test = self.data.test.first(min(TESTED, len(self.data.test)))
        return evaluate(self.model, [_double(batch) for batch in test.batches(250)])


def moments(subject: Subject, steps: Iterable[int]) -> Iterator[Moment]:
    """The model after each number of steps (0: untrained), in that order; trained once, and no further than needed.

    A step is the same whatever other steps are asked for: the learning rate goes by `subject.steps`.
    """
    wanted = list(steps)
    if not wanted or min(wanted) < 0 or max(wanted) > subject.steps:
        raise StudyError(f"expected steps from 0 to {subject.steps}, the length of the training, got {wanted}.")
    data = _DATA[subject.name](subject.seed)
    states = _states(subject, data, set(wanted))
    task, sample = task_of(subject.name), _double(_sample(subject, data))
    for step in wanted:
        model = _model(subject, data).double().eval()
        model.load_state_dict(states[step])
        batch = task.fixed(model, sample, subject.seed)
        yield Moment(step, model, batch, Objective(model, [batch], Loss(*task.loss)), data)


def at(subject: Subject, step: int) -> Moment:
    """The model after that many steps."""
    return next(moments(subject, [step]))


def installed(name: str) -> bool:
    """Whether the data are here; only Fashion-MNIST need not be."""
    return not name.endswith("fashion") or FASHION_FOLDER.is_dir()


# ---- how it came about


def _states(subject: Subject, data: Dataset, wanted: set[int]) -> dict[int, dict[str, Tensor]]:
    """Step → parameters."""
    model, last = _model(subject, data), max(wanted)
    states = {0: copy.deepcopy(model.state_dict())}

    def keep(index: int, loss: float, model: nn.Module) -> None:
        if index + 1 in wanted:
            states[index + 1] = copy.deepcopy(model.state_dict())
        if index + 1 == last:
            raise _EnoughError

    if last:
        with one_thread(), suppress(_EnoughError):
            _train(subject, model, data, keep)
            raise KeyboardInterrupt  # which training keeps to itself, and returns early
    return states


class _EnoughError(Exception):
    """All states are there."""


def _train(subject: Subject, model: nn.Module, data: Dataset, keep: Callable[[int, float, nn.Module], None]) -> None:
    train(
        model,
        data,
        task_of(subject.name).training,
        steps=subject.steps,
        batch=subject.batch,
        optimizer=subject.optimizer,
        lr=subject.lr,
        schedule=subject.schedule,
        seed=subject.seed,
        progress=False,
        callback=keep,
    )


def _sample(subject: Subject, data: Dataset) -> tuple[Tensor, Tensor]:
    if not 1 <= subject.samples <= len(data.train):
        raise StudyError(f"samples: expected 1 to {len(data.train):,} for '{subject.name}', got {subject.samples}.")
    sample = data.train.first(subject.samples)
    return sample.x, sample.y


def _double(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, y = batch
    return (x.double() if x.is_floating_point() else x), y


# ---- what there is

_DATA: dict[str, Callable[[int], Dataset]] = {
    "gpt_english": lambda seed: english(32, seed=seed),
    "gpt_addition": lambda seed: addition(seed=seed),
    "vit_digits": lambda seed: digits(seed=seed),
    "vit_fashion": lambda seed: fashion_mnist(seed=seed),
    "mlp_digits": lambda seed: digits(seed=seed),
    "mlp_fashion": lambda seed: fashion_mnist(seed=seed),
    "ssm_english": lambda seed: english(32, seed=seed),
    "rwkv_english": lambda seed: english(32, seed=seed),
    "vit_contrastive": lambda seed: digits(seed=seed),
    "vit_adversarial": lambda seed: digits(seed=seed),
}
NAMES = tuple(_DATA)
_TASKS = {"vit_contrastive": CONTRASTIVE, "vit_adversarial": ADVERSARIAL}
PATCHES = 4  # to a side: 16 tokens, of 2×2 pixels of a digit, of 7×7 of Fashion-MNIST


def task_of(name: str) -> Task:
    """What a subject is trained to do, and judged by: labels, unless its name says otherwise."""
    return _TASKS.get(name, LABELS)


def _model(subject: Subject, data: Dataset) -> nn.Module:
    make = {"gpt": _gpt, "vit": _vit, "mlp": _mlp, "ssm": _recurrent, "rwkv": _recurrent}
    return make[subject.name.partition("_")[0]](subject, data)


def _gpt(subject: Subject, data: Dataset) -> nn.Module:
    shape = (subject.width, subject.heads, subject.layers)
    return GPT(data.vocabulary, data.length, *shape, seed=subject.seed, **subject.options)


def _vit(subject: Subject, data: Dataset) -> nn.Module:
    shape, side = (subject.width, subject.heads, subject.layers), data.train.x.shape[-1]
    return ViT(side, side // PATCHES, 1, data.classes, *shape, seed=subject.seed, **subject.options)


def _mlp(subject: Subject, data: Dataset) -> nn.Module:
    sizes = [data.train.x[0].numel(), *[4 * subject.width] * subject.layers, data.classes]
    return MLP(sizes, seed=subject.seed)


def _recurrent(subject: Subject, data: Dataset) -> nn.Module:
    """As many parameters as the GPT of that size, to half a hidden unit: the feed-forward layers make up for it."""
    kind = StateSpace if subject.name.startswith("ssm") else LinearRecurrent
    shape: Any = (data.vocabulary, subject.width, subject.layers)
    wanted, least = _count(_gpt(replace(subject, options={}), data)), _count(kind(*shape, hidden=1, seed=0))
    hidden = 1 + max(0, round((wanted - least) / (2 * subject.width * subject.layers)))
    return kind(*shape, seed=subject.seed, **{"hidden": hidden, **subject.options})


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
