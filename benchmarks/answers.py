"""The curvature of a trained GPT and a trained ViT: eigenvalues and the whole answer, evolute beside its peers.

    python benchmarks/answers.py [--only gpt vit] [--threads 1] [--check]

The GPT has 4 layers, d = 128, 4 heads, and is trained on English prose; the ViT has 4 layers, d = 64, and is trained on
handwritten digits. Each gets one batch, so that the libraries that can keep the graph of one batch do. In one process:

- *ends*: ten eigenvalues at both ends to a residual of 1e-3 |λ|: `ev.eigsh`; SciPy's `eigsh` over the Hessian of
  curvlinops; PyHessian's power iteration, whose time is that of one iteration, measured, times the iterations that the
  gaps ask for (it finds eigenvalues in the order of their size, all larger ones before the tenth negative).
- *the whole answer*: ends, density, trace, Frobenius norm and all block norms (`ev.spectrum`, `ev.block_norms`),
  against the pieces of it that the best peer has: those ends; the density of as many probes and steps; the trace; the
  Frobenius norm, to the same error: the time of eight products of its plain estimator, times those that its variance
  2 Σλ⁴ asks for. A ratio without a target grants it a larger error instead, with FEW products. Nobody has block norms.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from curvlinops import HessianLinearOperator, hutchinson_squared_fro, hutchpp_trace
from pyhessian import hessian as pyhessian
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import evolute as ev
from evolute import zoo

K, TOL, PROBES, STEPS, BLOCK_PROBES, FEW = 10, 1e-3, 4, 60, 4, 1000
TARGETS = {"SciPy over curvlinops": 1 / 2, "PyHessian": 1 / 8, "whole answer": 1 / 5}


class Flat(nn.Module):
    """Logits as rows, which a plain CrossEntropyLoss takes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).flatten(0, -2)


@dataclass
class Case:
    name: str
    model: Flat
    x: Tensor
    y: Tensor
    trained: str

    @property
    def batch(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.x, self.y)]

    def objective(self) -> ev.Objective:
        return ev.Objective(self.model, self.batch, nn.CrossEntropyLoss())


def gpt() -> Case:
    data = zoo.english(length=128)
    return _trained("gpt", zoo.GPT(data.vocabulary, 128, 128, 4, 4, seed=0), data, batch=16, samples=4)


def vit() -> Case:
    return _trained("vit", zoo.ViT(8, 2, 1, 10, 64, 4, 4, seed=0), zoo.digits(), batch=64, samples=64)


def _trained(name: str, model: nn.Module, data: zoo.Dataset, batch: int, samples: int) -> Case:
    done = zoo.train(model, data, steps=200, batch=batch, lr=2e-3, schedule="warmup_cosine", seed=0, progress=False)
    x, y = data.train.first(samples).x, data.train.first(samples).y.flatten()
    return Case(name, Flat(model), x, y, f"{data.name}, loss {done.losses[0]:.2f} → {done.loss:.2f}")


CASES: dict[str, Callable[[], Case]] = {"gpt": gpt, "vit": vit}


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    answer = run()
    return time.perf_counter() - start, answer


# ---------------------------------------------------------------- the rows


def ours_ends(case: Case) -> Any:
    return ev.eigsh(ev.Hessian(case.objective()), K, tol=TOL, progress=False)


def ours_whole(case: Case) -> Any:
    H = ev.Hessian(case.objective())
    spectrum = ev.spectrum(H, PROBES, STEPS, k=K, progress=False)
    return spectrum, ev.block_norms(H, probes=BLOCK_PROBES, progress=False)


def curvlinops(case: Case) -> Any:
    params = list(case.model.parameters())
    return HessianLinearOperator(case.model, nn.CrossEntropyLoss(), params, case.batch, check_deterministic=False)


def scipy_ends(case: Case) -> tuple[int, np.ndarray]:
    op, done = curvlinops(case).to_scipy(), 0

    def product(v: np.ndarray) -> np.ndarray:
        nonlocal done
        done += 1
        return op.matvec(v)

    values, _ = eigsh(LinearOperator(op.shape, matvec=product, dtype=op.dtype), 2 * K, which="BE", tol=TOL)
    return done, np.sort(values)


def power_iterations(spectrum: Any) -> int:
    """Σ ln(1/tol) / ln(|λ_i| / |λ_i+1|) over all that are larger than the tenth negative one, each at most 100 000."""
    sizes = spectrum.nodes.abs().sort(descending=True).values
    last = int((sizes >= spectrum.smallest[K - 1].abs()).sum())
    gaps = (sizes[:last] / sizes[1 : last + 1]).log()
    return int((np.log(1 / TOL) / gaps).clamp_max(1e5).sum())


def pyhessian_iteration(case: Case, count: int = 20) -> float:
    """Seconds of one of its iterations, the graph of the gradient kept."""
    found = pyhessian(case.model, nn.CrossEntropyLoss(), data=(case.x, case.y), cuda=False)
    return timed(lambda: found.eigenvalues(maxIter=count, tol=0, top_n=1))[0] / count


def pyhessian_density(case: Case) -> float:
    """Seconds of PROBES runs of STEPS steps, from one of them: up to torch.eig, which comes last and is gone."""
    found = pyhessian(case.model, nn.CrossEntropyLoss(), data=(case.x, case.y), cuda=False)

    def run() -> None:
        with suppress(RuntimeError):
            found.density(iter=STEPS, n_v=1)

    return PROBES * timed(run)[0]


def frobenius_products(spectrum: Any) -> int:
    """Of the plain estimator ‖Hv‖², whose variance is 2 Σλ⁴, for the error that `spectrum` has."""
    fourth, norm = float(spectrum.sum_of(lambda x: x**4)), float(spectrum.frobenius)
    return int((fourth / 2) / (norm * max(spectrum.frobenius.standard_error, 1e-12)) ** 2) + 1


# ---------------------------------------------------------------- the table


def line(what: str, seconds: float, note: str = "") -> None:
    print(f"  {what:<42}{seconds:>9.1f} s   {note}", flush=True)


def measure(case: Case) -> dict[str, float]:
    """Prints the rows; the ratios that have a target."""
    print(f"\n{case.name}: {sum(p.numel() for p in case.model.parameters()):,} parameters; {case.trained}")
    ends_time, ends = timed(lambda: ours_ends(case))
    line("ends: evolute", ends_time, f"{ends.products} products, {ends.status}, worst {float(ends.relative.max()):.1e}")
    whole_time, (spectrum, blocks) = timed(lambda: ours_whole(case))
    worst = max(float((b / v.abs()).max()) for v, b in _both(spectrum))
    note = (
        f"{spectrum.products} + {blocks.products} products, ends within {worst:.1e}, {len(blocks.names)}² block norms"
    )
    line("whole answer: evolute", whole_time, note)
    with sdpa_kernel(SDPBackend.MATH):
        theirs, pieces = rivals(case, spectrum, ends)
    line("whole answer: peers, without block norms", pieces["same error"])
    ratios = {name: ends_time / seconds for name, seconds in theirs.items()}
    print(f"  evolute ÷ whole answer, Frobenius norm of {FEW} products: {whole_time / pieces['few']:.3f}")
    return ratios | {"whole answer": whole_time / pieces["same error"]}


def _both(spectrum: Any) -> list[tuple[Tensor, Tensor]]:
    return [(spectrum.largest, spectrum.largest_bounds), (spectrum.smallest, spectrum.smallest_bounds)]


def rivals(case: Case, spectrum: Any, ends: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds for the ends of each, and for the pieces of the best of them."""
    scipy, (count, values) = timed(lambda: scipy_ends(case))
    off = np.abs(values - ends.values.numpy()).max()
    line("ends: SciPy over curvlinops", scipy, f"{count} products, largest difference {off:.1e}")
    iteration, iterations = pyhessian_iteration(case), power_iterations(spectrum)
    line("ends: PyHessian", iteration * iterations, f"{iterations} iterations of {iteration:.2f} s")
    density = pyhessian_density(case)
    line("density: PyHessian", density, f"{PROBES} probes × {STEPS} steps, one probe measured")
    trace, _ = timed(lambda: hutchpp_trace(curvlinops(case), num_matvecs=30))
    line("trace: curvlinops, Hutch++", trace, "30 products")
    needed = frobenius_products(spectrum)
    each = timed(lambda: hutchinson_squared_fro(curvlinops(case), num_matvecs=8))[0] / 8
    line("Frobenius norm: curvlinops", each * needed, f"{needed:,} products for our error, {each:.3f} s each")
    others = min(scipy, iteration * iterations) + density + trace
    totals = {"same error": others + each * needed, "few": others + each * min(needed, FEW)}
    return {"SciPy over curvlinops": scipy, "PyHessian": iteration * iterations}, totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="exit status 1 if a target is missed")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", category=UserWarning)
    print(f"{arguments.threads} threads, load {os.getloadavg()[0]:.1f}")
    missed = 0
    for name in arguments.only:
        for what, ratio in measure(CASES[name]()).items():
            missed += ratio > TARGETS[what]
            word = "reached" if ratio <= TARGETS[what] else "MISSED"
            print(f"  evolute ÷ {what:<24}{ratio:>8.3f}   target {TARGETS[what]:.3f} {word}")
    print(f"load {os.getloadavg()[0]:.1f}")
    return int(arguments.check and missed > 0)


if __name__ == "__main__":
    sys.exit(main())
