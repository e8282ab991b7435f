"""One attention layer, its Hessian product: evolute's attention against SDPBackend.MATH, in time and in peak memory.

    python benchmarks/attention.py [--lengths 1024 4096] [--vectors 8] [--repeats 5] [--threads 2]

The layer has d = 128, 4 heads of 32, QKV and output projections, a causal mask, one sequence, float32; the loss is the
mean square of its output. The graph of the gradient is kept, and a product is grad(<gradient, v>). Times are the best
of several, taken in turns within one process; memory is how much the peak resident set of a process grows that builds
one such graph and multiplies, beyond what a plain gradient with fused attention has taken there before.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from evolute.engine.attention import attention, scores_within

WIDTH, HEADS = 128, 4
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def composed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return fused(q, k, v)


def streamed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with scores_within(0):
        return attention(q, k, v, is_causal=True)


def kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with scores_within(1 << 40):
        return attention(q, k, v, is_causal=True)


WAYS: dict[str, Attend] = {"MATH": composed, "streamed": streamed, "kept": kept}


class Layer:
    """An attention layer with a scalar loss, and vectors to multiply with."""

    def __init__(self, length: int, vectors: int) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(1, length, WIDTH)
        self.weights = [torch.randn(n, WIDTH).div_(WIDTH**0.5).requires_grad_() for n in (3 * WIDTH, WIDTH)]
        self.vectors = [torch.randn(vectors, *w.shape) for w in self.weights]

    def loss(self, attend: Attend) -> Tensor:
        qkv, out = self.weights
        q, k, v = (self.x @ qkv.T).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return ((attend(q, k, v).transpose(1, 2).flatten(2) @ out.T) ** 2).mean()

    def gradient(self, attend: Attend) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.loss(attend), self.weights)

    def slopes(self, attend: Attend) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.loss(attend), self.weights, create_graph=True)

    def product(self, slopes: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(slopes, self.weights, [v[0] for v in self.vectors], retain_graph=True)

    def products(self, slopes: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(slopes, self.weights, self.vectors, retain_graph=True, is_grads_batched=True)


def best(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The shortest of several times of each, in turns, after one that does not count."""
    times = {name: float("inf") for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name] = min(times[name], time.perf_counter() - start) if turn else float("inf")
    return times


def timed(length: int, vectors: int, repeats: int) -> dict[str, dict[str, float]]:
    layer = Layer(length, vectors)
    graphs = {name: layer.slopes(attend) for name, attend in WAYS.items()}
    exact = layer.product(graphs["MATH"])
    for name in ("streamed", "kept"):
        for x, y in zip(layer.product(graphs[name]), exact, strict=True):
            assert (x - y).norm() <= 1e-4 * y.norm(), f"{name} is not what MATH computes"
    single = {name: (lambda g=g: layer.product(g)) for name, g in graphs.items()}
    several = {name: (lambda g=g: layer.products(g)) for name, g in graphs.items() if name != "MATH"}
    gradient = best({"gradient": lambda: layer.gradient(fused)}, repeats)
    batched = best(several, max(1, repeats // 2)) if vectors > 1 else {}
    return {"one": gradient | best(single, repeats), "several": batched}


def peak() -> float:
    """The largest resident set so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def grown(length: int, vectors: int, way: str) -> float:
    layer = Layer(length, vectors)
    for _ in range(2):
        layer.gradient(fused)
    before = peak()
    slopes = layer.slopes(WAYS[way])
    for _ in range(2):
        _ = layer.product(slopes) if vectors == 1 else layer.products(slopes)
    return peak() - before


def in_process(what: str, *arguments: object) -> dict[str, dict[str, float]]:
    """The answer of this file, run anew: memory once taken is not seen again."""
    command = [sys.executable, __file__, "--measure", what, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(what: str, *arguments: str) -> None:
    threads, length, vectors, last = arguments
    torch.set_num_threads(int(threads))
    if what == "time":
        print(json.dumps(timed(int(length), int(vectors), int(last))))
    else:
        print(json.dumps({"one": {last: grown(int(length), int(vectors), last)}}))


def row(*cells: object) -> None:
    print(" ".join(str(cell).rjust(width) for cell, width in zip(cells, (5, 26, 11, 11, 11, 11), strict=False)))


def table(length: int, vectors: int, repeats: int, threads: int) -> None:
    times = in_process("time", threads, length, vectors, repeats)
    memory = {way: in_process("memory", threads, length, 1, way)["one"][way] for way in WAYS}
    one, several = times["one"], times["several"]
    row(length, "gradient, fused", f"{one['gradient'] * 1e3:.1f}")
    for way in WAYS:
        ratios = f"{one[way] / one['MATH']:.2f}", f"{memory[way]:.0f}", f"{memory[way] / memory['MATH']:.3f}"
        row(length, f"product, {way}", f"{one[way] * 1e3:.1f}", *ratios)
    for way, seconds in several.items():
        each = seconds / vectors
        row(length, f"{vectors} products, {way}, each", f"{each * 1e3:.1f}", f"{each / one['MATH']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--vectors", type=int, default=8, help="how many for the rows of several products at once")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    row("L", "", "ms", "÷ MATH", "MB", "÷ MATH")
    for length in options.lengths:
        table(length, options.vectors, options.repeats, options.threads)


if __name__ == "__main__":
    main()
