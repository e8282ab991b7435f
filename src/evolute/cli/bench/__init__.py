"""evolute beside the other libraries that are installed here, on one small Transformer."""

from evolute.cli.bench.command import bench

__all__ = ["bench"]
