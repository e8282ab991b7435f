"""Settings that hold for every test: offline, one thread per worker, the same random numbers every time."""

import os
import random

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: a test that reaches for the network fails at once

import hypothesis
import numpy as np
import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers share the cores

hypothesis.settings.register_profile("evolute", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.load_profile("evolute")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same global random numbers, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  the global generator is the point
    torch.manual_seed(0)
    return 0
