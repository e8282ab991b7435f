"""Small models and embedded data to look at."""

from evolute.zoo.block import Block, BlockConfig

__all__ = ["Block", "BlockConfig"]
