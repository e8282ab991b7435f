"""Other libraries for curvature: which are here, and how to get one."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

# Installed without their dependencies, which would bring another torch, but with what they import.
NO_TORCH = "pip install --no-deps"


@dataclass(frozen=True)
class Peer:
    """A package, its name on PyPI, and the line that installs it."""

    module: str
    package: str
    install: str

    @property
    def version(self) -> str | None:
        """None where it is not installed."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None


PEERS = (
    Peer(
        "curvlinops",
        "curvlinops-for-pytorch",
        f"{NO_TORCH} curvlinops-for-pytorch backpack-for-pytorch linear_operator einops einconv unfoldNd tqdm",
    ),
    Peer("pyhessian", "pyhessian", f"{NO_TORCH} pyhessian"),
    Peer("hessian_eigenthings", "hessian-eigenthings", f"{NO_TORCH} hessian-eigenthings tqdm"),
    Peer("jax", "jax", "pip install jax"),
)
