"""Long work on disk: tensors and counters in one safetensors file, replaced in one step, refused if not ours."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from evolute.errors import CheckpointError
from evolute.krylov.storage import write

EVERY = 30.0  # seconds between two files
ADVICE = "Delete it to start anew, or give another path."


@dataclass(frozen=True)
class State:
    """Everything that the rest of the work depends on."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


@dataclass
class Checkpoint:
    """One file for one piece of work. `settings` say which: a file with other settings is refused."""

    path: Path
    settings: Mapping[str, Any]
    saved: float = field(default_factory=time.monotonic)

    def load(self) -> State | None:
        """What was saved, or None where there is no file yet."""
        if not self.path.exists():
            if not self.path.parent.is_dir():
                raise CheckpointError(f"checkpoint '{self.path}': the folder does not exist; make it first.")
            return None
        settings, state = self._read()
        for name, wanted in self.settings.items():
            if settings.get(name) != wanted:
                raise CheckpointError(
                    f"checkpoint '{self.path}' belongs to other work: {name} is {settings.get(name)!r} there and "
                    f"{wanted!r} here. {ADVICE}"
                )
        return state

    def _read(self) -> tuple[dict[str, Any], State]:
        try:
            with safe_open(self.path, framework="pt") as file:
                described = json.loads(file.metadata()["evolute"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
            return described["settings"], State(tensors, described["values"])
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint '{self.path}' cannot be read, it is damaged or no checkpoint: {error}. {ADVICE}"
            ) from error

    def save(self, state: State) -> None:
        described = {"settings": dict(self.settings), "values": dict(state.values)}
        tensors = {name: each.detach().cpu().contiguous() for name, each in state.tensors.items()}
        write(self.path, save(tensors, {"evolute": json.dumps(described)}))
        self.saved = time.monotonic()

    def save_if_due(self, state: Callable[[], State]) -> None:
        if time.monotonic() - self.saved >= EVERY:
            self.save(state())
