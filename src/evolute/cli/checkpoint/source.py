"""Where a checkpoint is: a folder, or a name on the hub. Everything of transformers is asked through here."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evolute.cli.refusal import Refusal, first_sentence, refuse
from evolute.zoo.extras import extra


@dataclass(frozen=True)
class Source:
    """A folder, or a name on the hub; code that lies beside the weights runs only if it is trusted."""

    where: str
    local: bool
    trusted: bool = False

    @property
    def name(self) -> str:
        """To be printed: the last part of the folder, or all of the name on the hub."""
        return Path(self.where).name if self.local else self.where

    def load(self, maker: Any, what: str, **options: Any) -> Any:
        """`maker.from_pretrained` of it, quietly; what goes wrong in files of a stranger's is one sentence."""
        try:
            with quiet():
                return maker.from_pretrained(self.where, trust_remote_code=self.trusted, **options)
        except Exception as problem:
            raise Refusal(self._why(problem, what)) from problem

    def _why(self, problem: Exception, what: str) -> str:
        if not self.trusted and "trust_remote_code" in str(problem):
            return f"'{self.where}' brings code of its own, which is run only with --trust-remote-code; read it first"
        if not self.local and isinstance(problem, OSError):
            return f"'{self.where}' is not a folder here, nor to be had from the hub: {first_sentence(problem)}"
        return f"{what} of '{self.where}' cannot be read: {first_sentence(problem)}"


def find(given: str, *, trusted: bool) -> Source:
    """A folder if there is one, a name on the hub if it can be one."""
    place = Path(given).expanduser()
    if place.is_dir():
        if not (place / "config.json").is_file():
            refuse(f"'{given}' has no config.json; expected a folder that save_pretrained wrote")
        return Source(str(place), local=True, trusted=trusted)
    if place.exists():
        refuse(f"'{given}' is a file; expected the folder of a Hugging Face checkpoint")
    if _is_path(given, place):
        refuse(
            f"there is no folder '{given}'; expected one that save_pretrained wrote, or the name of a model on the hub"
        )
    return Source(given, local=False, trusted=trusted)


def _is_path(given: str, place: Path) -> bool:
    inside = len(place.parts) > 1 and Path(place.parts[0]).exists()
    return given.startswith((".", "/", "~")) or len(place.parts) > 2 or inside or not given


def library() -> Any:
    """The package transformers, or the command that installs it."""
    return extra("transformers", "transformers", "Hugging Face checkpoints")


@contextmanager
def quiet() -> Generator[None]:
    """Without the bars and tables of transformers: what matters in them becomes a sentence."""
    transformers_log = library().utils.logging
    hub, verbosity = logging.getLogger("huggingface_hub"), transformers_log.get_verbosity()
    bars, level = transformers_log.is_progress_bar_enabled(), hub.level
    try:
        transformers_log.set_verbosity(logging.CRITICAL)
        transformers_log.disable_progress_bar()
        hub.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_log.set_verbosity(verbosity)
        hub.setLevel(level)
        if bars:
            transformers_log.enable_progress_bar()
