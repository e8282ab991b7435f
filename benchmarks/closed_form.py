"""The exact Hessian of a Transformer block in closed form: dense, by its norms, in products, and how its cost grows."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from products import busy, confine, environment, progress, resident
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import evolute as ev
from evolute.linop.exact import diagonal, frobenius
from evolute.zoo import Block, BlockConfig

SECTIONS = ("dense", "large", "products", "growth")
GROUPS = ["q", "k", "v", "w1", "w2"]
FUNC, CURVLINOPS, EIGENTHINGS = "torch.func.hessian", "curvlinops, Hessian @ I", "hessian-eigenthings, H @ I"


class Setup:
    """A post-norm block in float64: one head, no output projection, ReLU, no biases, norms that are not trained."""

    def __init__(self, width: int = 32, hidden: int = 128, length: int = 18, sequences: int = 8) -> None:
        torch.manual_seed(0)
        config = BlockConfig(width=width, heads=1, hidden=hidden, output=False)
        self.layer = Block(config).double()
        for name, parameter in self.layer.named_parameters():
            parameter.requires_grad_("norm" not in name)
        self.x, self.y = torch.randn(2, sequences, length, width, dtype=torch.float64)
        self.weights = {name: p for name, p in self.layer.named_parameters() if p.requires_grad}
        self.P = sum(p.numel() for p in self.weights.values())

    def closed(self) -> Any:
        return ev.closed_form(self.layer, self.x, self.y)

    def engine(self) -> Any:
        return ev.Hessian(ev.Objective(self.layer, [(self.x, self.y)], torch.nn.MSELoss()))


@dataclass
class Report:
    """The lines of a section, and what they say about its targets: (met, sentence)."""

    name: str
    lines: list[str] = field(default_factory=list)
    verdicts: list[tuple[bool, str]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def row(self, name: str, seconds: float, rest: str = "") -> None:
        self.numbers[name] = seconds
        self.lines.append(f"  {name:<44}{seconds * 1e3:>12.2f} ms{rest}")

    def target(self, value: float, most: float, text: str) -> None:
        self.numbers[text] = value
        self.verdicts.append((value <= most, f"{self.name}: {text}: {value:.3g}, at most {most:g}"))


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The least time of each, taken in turns: what disturbs the machine disturbs all of them."""
    best = {name: float("inf") for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            best[name] = min(best[name], timed(function))
    return best


# ---- dense


def dense(setup: Setup) -> Tensor:
    """From the layer and its data to the matrix."""
    return ev.to_dense(setup.closed().restrict(GROUPS))


def func_hessian(setup: Setup) -> Tensor:
    names, sizes = list(setup.weights), [p.numel() for p in setup.weights.values()]

    def loss(flat: Tensor) -> Tensor:
        pieces = zip(setup.weights.values(), flat.split(sizes), strict=True)
        weights = dict(zip(names, [piece.view(p.shape) for p, piece in pieces], strict=True))
        return torch.nn.functional.mse_loss(torch.func.functional_call(setup.layer, weights, (setup.x,)), setup.y)

    with sdpa_kernel(SDPBackend.MATH):
        return torch.func.hessian(loss)(torch.cat([p.detach().flatten() for p in setup.weights.values()]))


def curvlinops_columns(setup: Setup, columns: int) -> Tensor:
    import curvlinops

    data, loss = [(setup.x, setup.y)], torch.nn.MSELoss()
    parameters = list(setup.weights.values())
    H = curvlinops.HessianLinearOperator(setup.layer, loss, parameters, data, check_deterministic=False)
    return torch.cat([H @ part for part in unit(setup.P, columns).split(128, 1)], 1)


def eigenthings_columns(setup: Setup, columns: int) -> Tensor:
    import hessian_eigenthings as he

    H = he.HessianOperator(setup.layer, [(setup.x, setup.y)], he.supervised_loss(torch.nn.MSELoss()))
    return torch.stack([H @ column for column in unit(setup.P, columns).T], 1)


def unit(size: int, columns: int) -> Tensor:
    return torch.eye(size, columns, dtype=torch.float64)


PEERS = {CURVLINOPS: ("curvlinops", curvlinops_columns), EIGENTHINGS: ("hessian_eigenthings", eigenthings_columns)}


def dense_section(options: argparse.Namespace) -> Report:
    setup, out = Setup(), Report("dense")
    ours = min(timed(lambda: dense(setup)) for _ in range(options.rounds))
    matrix = dense(setup)
    out.row("evolute, closed form", ours)
    peers = {name: peer(setup, name, matrix, out, options.columns) for name in PEERS if installed(name)}
    if not options.no_func:
        progress(f"dense: {FUNC}, once")
        start = time.perf_counter()
        truth = func_hessian(setup)
        peers[FUNC] = time.perf_counter() - start
        error = float(torch.linalg.vector_norm(truth.sub_(matrix)) / torch.linalg.vector_norm(matrix))
        out.row(FUNC, peers[FUNC], f"{peers[FUNC] / ours:>9.0f}×{error:>12.0e}")
        out.target(error, 1e-12, f"difference from {FUNC}")
        out.target(ours / peers.pop(FUNC), 1 / 80, f"time ÷ {FUNC}")
    ours = min(ours, *(timed(lambda: dense(setup)) for _ in range(options.rounds)))  # after the others as well
    if peers:
        best = min(peers, key=lambda name: peers[name])
        out.target(ours / peers[best], 1 / 40, f"time ÷ {best}")
    elsewhere("dense", 1.3 * 8 * setup.P**2, out, options)
    return out


def installed(name: str) -> bool:
    return importlib.util.find_spec(PEERS[name][0]) is not None


def peer(setup: Setup, name: str, matrix: Tensor, out: Report, columns: int) -> float:
    """Some of the columns, scaled up to all: each costs the same."""
    progress(f"dense: {name}")
    with sdpa_kernel(SDPBackend.MATH):
        PEERS[name][1](setup, 8)  # what is set up once
        start = time.perf_counter()
        found = PEERS[name][1](setup, columns)
    seconds = (time.perf_counter() - start) * setup.P / columns
    error = float((found - matrix[:, :columns]).norm() / matrix[:, :columns].norm())
    out.row(
        f"{name}, from {columns} columns",
        seconds,
        f"{seconds / out.numbers['evolute, closed form']:>9.0f}×{error:>12.0e}",
    )
    return seconds


# ---- a block that does not fit


def large() -> Setup:
    return Setup(128, 512, 18, 64)


def exact(setup: Setup) -> tuple[Tensor, float]:
    """(diagonal, Frobenius norm) of the W1–W1 block; the trace is the sum of the first."""
    block = setup.closed().block("w1", "w1")
    return diagonal(block), frobenius(block)


def probed(setup: Setup, probes: int, at_once: int = 8) -> tuple[Tensor, float]:
    """(vᵀHv of random signs, seconds for each), with the engine's products."""
    block = setup.engine()
    block = block.block("mlp.up.weight", "mlp.up.weight")
    signs = torch.randn(probes, block.shape[0], dtype=torch.float64).sign()
    _ = block @ signs[:at_once].T  # recorded
    start = time.perf_counter()
    values = torch.cat([(part * (block @ part.T).T).sum(1) for part in signs.split(at_once)])
    return values, (time.perf_counter() - start) / probes


def large_section(options: argparse.Namespace) -> Report:
    setup, out = large(), Report("large")
    progress("large: exact")
    start = time.perf_counter()
    found, norm = exact(setup)
    ours, trace = time.perf_counter() - start, float(found.sum())
    progress("large: probes")
    values, each = probed(setup, options.probes)
    needed = max(1.0, float(values.var()) / (0.01 * trace) ** 2)
    out.row("exact trace, diagonal and Frobenius norm", ours, f"   trace {trace:.6g}, norm {norm:.6g}")
    wide = float(values.std()) / options.probes**0.5
    out.row(
        f"Hutchinson to 1 %: {needed:.0f} probes", needed * each, f"   trace {float(values.mean()):.6g} ± {wide:.2g}"
    )
    out.target(ours / (needed * each), 1, "time ÷ Hutchinson's")
    elsewhere("large", 3e9, out, options)
    return out


# ---- products


def products_section(options: argparse.Namespace) -> Report:
    setup, out = Setup(), Report("products")
    closed, engine = setup.closed(), setup.engine()
    for width in (1, 64):
        ours = torch.randn(closed.shape[1], width, dtype=torch.float64)
        theirs = torch.randn(engine.shape[1], width, dtype=torch.float64)
        _ = closed @ ours, engine @ theirs
        ways = {"closed": lambda v=ours: closed @ v, "engine": lambda v=theirs: engine @ v}
        best = interleaved(ways, options.rounds * (60 if width == 1 else 6))
        for name, seconds in best.items():
            out.row(f"{name} @ {width} vector{'s' if width > 1 else ''}", seconds)
        most = 1.02 if width == 1 else 1  # two equal times differ by as much
        out.target(best["closed"] / best["engine"], most, f"closed ÷ engine, {width} at once")
    return out


# ---- growth


def growth_section(options: argparse.Namespace) -> Report:
    out = Report("growth", [f"  {'ms':<24}{'product':>10}{'dense':>10}{'diagonal':>10}{'Frobenius':>11}"])
    sequences = [(18, B) for B in (4, 8, 16, 32)]
    lengths = [(L, 8) for L in (9, 18, 36, 72)]
    for title, sizes in (("sequences", sequences), ("length", lengths)):
        rows = [curve(L, B, out, options.rounds) for L, B in sizes]
        if title == "sequences":
            for name in ("product", "dense", "diagonal"):
                ratio = rows[-1][name] / rows[-3][name]
                out.target(ratio, 4 * 1.25, f"{name}: 4 times the sequences, time")
    return out


def curve(length: int, sequences: int, out: Report, rounds: int) -> dict[str, float]:
    progress(f"growth: {sequences} sequences of {length}")
    setup = Setup(16, 64, length, sequences)
    closed = setup.closed()
    block, v = closed.restrict(GROUPS), torch.randn(closed.shape[1], 16, dtype=torch.float64)
    ways = {
        "product": lambda: closed @ v,
        "dense": lambda: ev.to_dense(block),
        "diagonal": lambda: diagonal(block),
        "Frobenius": lambda: frobenius(block),
    }
    best = interleaved(ways, rounds)
    text = "".join(f"{best[name] * 1e3:>{width}.1f}" for name, width in zip(ways, (10, 10, 10, 11), strict=True))
    out.lines.append(f"  {f'{sequences} sequences of {length}':<24}{text}")
    out.numbers[f"{sequences} × {length}"] = best
    return best


# ---- memory, in a process of its own

PEAKS: dict[str, tuple[Callable[[], Setup], Callable[[Setup], object]]] = {
    "dense": (Setup, dense),
    "large": (large, exact),
}


def peak(section: str) -> int:
    """Bytes above the layer and its data."""
    make, run = PEAKS[section]
    setup, matrix = make(), torch.randn(256, 256)
    _ = matrix @ matrix  # the threads are there
    Path("/proc/self/clear_refs").write_text("5")  # the maximum starts from here
    before = resident("VmRSS")
    _ = run(setup)
    return resident("VmHWM") - before


def elsewhere(section: str, most: float, out: Report, options: argparse.Namespace) -> None:
    progress(f"{section}: memory")
    command = [sys.executable, __file__, "--peak", section, "--threads", str(options.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    taken = int(done.stdout.split()[-1]) / 1e9
    out.lines.append(f"  {'peak memory':<44}{taken:>12.3f} GB")
    out.target(taken, most / 1e9, "peak memory in GB")


# ---- the command

RUN: dict[str, Callable[[argparse.Namespace], Report]] = {
    "dense": dense_section,
    "large": large_section,
    "products": products_section,
    "growth": growth_section,
}
HEADINGS = {
    "dense": "dense: the whole Hessian, P = 11,264; from the layer to the matrix",
    "large": "large: W1-W1, 65,536², 34 GB if dense; d = 128, f = 512, 1,152 tokens",
    "products": "products with the whole Hessian, P = 11,264",
    "growth": "growth: 16 vectors at once; d = 16, f = 64, P = 2,816",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  closed_form.py                               everything; some five minutes and 14 GB\n"
        "  closed_form.py --only products growth        half a minute\n"
        "  closed_form.py --only dense --no-func        without torch.func.hessian, which needs 13 GB\n"
        "  closed_form.py --check --json table.json     for CI: exit status 1 if a target is missed\n",
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    add("--rounds", type=int, default=5, help="turns of each row (default: 5)")
    add("--columns", type=int, default=512, help="columns that other libraries compute (default: 512)")
    add("--probes", type=int, default=64, help="products from which Hutchinson's variance is read (default: 64)")
    add("--no-func", action="store_true", help=f"leave {FUNC} out, which takes 13 GB and most of a minute")
    add("--check", action="store_true", help="exit with 1 if a target is missed")
    add("--json", type=Path, metavar="FILE", help="save the numbers, with versions and load of the machine")
    add("--threads", type=int, default=2, help="threads and cores to use (default: 2)")
    add("--peak", choices=tuple(PEAKS), help="print the peak memory of a section in bytes, no more")
    options = parser.parse_args()
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: the folder {options.json.absolute().parent} does not exist")
    return options


def show(reports: Sequence[Report]) -> Iterator[str]:
    for report in reports:
        yield f"\n{HEADINGS[report.name]}"
        yield from report.lines
    yield ""
    yield from (f"{'met' if good else 'MISSED':<8}{text}" for report in reports for good, text in report.verdicts)


def main() -> int:
    options = arguments()
    confine(options.threads)
    warnings.filterwarnings("ignore", module=r"torch\.")
    if options.peak:
        print(peak(options.peak))
        return 0
    about = environment(options.threads)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    reports = [RUN[name](options) for name in SECTIONS if name in options.only]
    progress("")
    print(*show(reports), sep="\n")
    about["load at the end"] = round(os.getloadavg()[0], 2)
    print("\n" + busy(about["load"], about["load at the end"], options.threads))
    if options.json:
        saved = {report.name: asdict(report) for report in reports}
        options.json.write_text(json.dumps({"environment": about, "results": saved}, indent=1))
    return int(options.check and not all(good for report in reports for good, _ in report.verdicts))


if __name__ == "__main__":
    sys.exit(main())
