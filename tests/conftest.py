"""Settings that hold for every test: offline, one thread per worker, the same random numbers every time."""

import os
import random
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: a test that reaches for the network fails at once

import hypothesis
import jaxtyping
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


@pytest.fixture(autouse=True)
def _type_checks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run-time shape and type checks, but for tests marked `bad_input`."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", request.node.get_closest_marker("bad_input") is not None)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
