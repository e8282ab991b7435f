"""Hugging Face checkpoints on the user's text or images."""

from evolute.cli.checkpoint.subject import TASKS, checkpoint

__all__ = ["TASKS", "checkpoint"]
