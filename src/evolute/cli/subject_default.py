"""The embedded default: a small Transformer that learns to add, in seconds and offline."""

from __future__ import annotations

from typing import Any

from evolute import Loss, Objective
from evolute.cli.subject import Options, Subject, chosen
from evolute.zoo import TrainingResult, cross_entropy, trained_addition

SAMPLES, BATCH = 128, 16  # a product takes 50 ms of one core; some 800 of them make a page
TRAINED_BATCH = 64


def embedded(options: Options, *, progress: bool) -> Subject:
    """Trained on digit addition; Ctrl-C while it trains ends the command, for nothing is finished yet."""
    trained = trained_addition(batch=TRAINED_BATCH, seed=options.seed, progress=progress)
    if trained.result.interrupted:
        raise KeyboardInterrupt
    model = trained.model.to(device=options.device, dtype=options.dtype)
    data = trained.data.first(options.samples or SAMPLES)
    batches = data.batches(options.batch_size or BATCH)
    params = chosen(model, options.params)
    objective = Objective(model, batches, Loss(*cross_entropy), params=params, memory=options.memory)
    about = {"model": "a GPT that was trained for this page", "data": data.name, "fingerprint": data.fingerprint}
    return Subject(objective, "A small GPT that adds", about, _training(trained.result), small=True)


def _training(result: TrainingResult) -> dict[str, Any]:
    told = ("optimizer", "lr", "schedule", "steps", "accuracy", "losses")
    return {name: getattr(result, name) for name in told} | {"batch": TRAINED_BATCH}
