"""Small models and embedded data to look at."""

from evolute.zoo.block import Block, BlockConfig
from evolute.zoo.data import Dataset, Samples
from evolute.zoo.data_addition import addition
from evolute.zoo.data_folder import image_folder
from evolute.zoo.data_images import digits, fashion_mnist
from evolute.zoo.data_text import english, text
from evolute.zoo.linear_recurrence import LinearRecurrence
from evolute.zoo.losses import cross_entropy
from evolute.zoo.models import GPT, MLP, AttentionOnly, ViT
from evolute.zoo.recurrent import LinearRecurrent, RecurrentBlock, StateSpace
from evolute.zoo.scoring import Score, evaluate
from evolute.zoo.selective_scan import SelectiveScan
from evolute.zoo.trained import Trained, trained_addition
from evolute.zoo.training import TrainingResult, train

__all__ = [
    "GPT",
    "MLP",
    "AttentionOnly",
    "Block",
    "BlockConfig",
    "Dataset",
    "LinearRecurrence",
    "LinearRecurrent",
    "RecurrentBlock",
    "Samples",
    "Score",
    "SelectiveScan",
    "StateSpace",
    "Trained",
    "TrainingResult",
    "ViT",
    "addition",
    "cross_entropy",
    "digits",
    "english",
    "evaluate",
    "fashion_mnist",
    "image_folder",
    "text",
    "train",
    "trained_addition",
]
