"""What a product with a curvature matrix costs, in gradients: evolute beside the others, measured in one run."""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import (
    SIZES,
    WIDE,
    Case,
    Product,
    curvlinops,
    eigenthings,
    evolute,
    func_jvp,
    func_linearize,
    gradient,
    jax_gradient,
    jax_linearize,
    kept_graph,
    off,
    pyhessian,
    truth,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

ROUNDS = {"small": 30, "large": 8}
WIDE_EVERY = 3  # the rows with 16 vectors take part in every third round


@dataclass(frozen=True)
class Row:
    """One line of the table. `matrix`: what it multiplies with; `keeps`: the primal pass is paid once only."""

    name: str
    build: Callable[[Case], Product]
    matrix: str = "H"
    keeps: bool = True
    width: int = 1
    math: bool = False  # needs SDPBackend.MATH
    targets: dict[str, float] = field(default_factory=dict)

    @property
    def needs(self) -> str:
        """The module without which there is no such row."""
        return self.name.split()[0].rstrip(",").replace("hessian-", "hessian_").lower()

    @property
    def ours(self) -> bool:
        return self.needs == "evolute"

    @property
    def unit(self) -> str:
        """The gradient that it is divided by."""
        return "JAX gradient" if self.needs == "jax" else "torch gradient"

    def setting(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(SDPBackend.MATH) if self.math else nullcontext()

    def rivals(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of others that answer the same question; those that keep, only if this one does."""
        same = [r for r in rows if not r.ours and r.needs != "jax" and (r.matrix, r.width) == (self.matrix, self.width)]
        return [r for r in same if self.keeps or not r.keeps]


ROWS = [
    Row("torch gradient", gradient, "g"),
    Row("torch gradient, math", gradient, "g", math=True),
    Row("JAX gradient", jax_gradient, "g"),
    Row("evolute Hessian, kept", partial(evolute, "Hessian"), targets={"large": 2.15, "small": 2.4}),
    Row("evolute Hessian, recomputed", partial(evolute, "Hessian", memory=0), keeps=False, targets={"large": 3.2}),
    Row("PyHessian", pyhessian, math=True),
    Row("torch kept graph", kept_graph, math=True),
    Row("torch func.linearize(grad)", func_linearize, math=True),
    Row("torch func.jvp(grad)", func_jvp, keeps=False, math=True),
    Row("hessian-eigenthings", partial(eigenthings, "Hessian"), keeps=False, math=True),
    Row("curvlinops Hessian", partial(curvlinops, "Hessian"), keeps=False, math=True),
    Row("JAX jit(linearize(grad))", jax_linearize),
    Row("evolute Gauss-Newton", partial(evolute, "GaussNewton"), "G", targets={"large": 1.5}),
    Row("hessian-eigenthings GGN", partial(eigenthings, "GGN"), "G", keeps=False, math=True),
    Row("curvlinops GGN", partial(curvlinops, "GGN"), "G", keeps=False, math=True),
    Row("evolute Hessian, 16 at once", partial(evolute, "Hessian", vector="rows"), width=WIDE, targets={"small": 1.4}),
    Row("torch vmap(linearize(grad)), 16", partial(func_linearize, vector="rows"), width=WIDE, math=True),
    Row("curvlinops, 16 at once", partial(curvlinops, "Hessian", vector="rows"), keeps=False, width=WIDE, math=True),
]
HEADINGS = {
    ("g", 1): "a gradient",
    ("H", 1): "Hessian @ vector",
    ("G", 1): "Gauss-Newton @ vector",
    ("H", WIDE): f"Hessian @ {WIDE} vectors, per vector",
}


# ---- how it is measured


@dataclass
class Measured:
    """What one row came to; times in seconds, memory in bytes."""

    row: Row
    product: Product | None = None
    times: list[float] = field(default_factory=list)
    setup: float = 0.0
    error: float | None = None
    peak: int | None = None
    failure: str = ""

    @property
    def each(self) -> tuple[float, float]:
        """(median, minimum) of the time for one vector."""
        return statistics.median(self.times) / self.row.width, min(self.times) / self.row.width


def prepare(row: Row, case: Case, exact: dict[str, Tensor]) -> Measured:
    """Set-up is the time to the first answer."""
    out, start = Measured(row), time.perf_counter()
    try:
        with row.setting():
            out.product = row.build(case)
            result = out.product()
        out.setup = time.perf_counter() - start
        out.error = off(case, result, exact[row.matrix])
    except Exception as problem:  # a peer that fails is a line of the table, not the end of it
        out.product, out.failure = None, f"{type(problem).__name__}: {problem}".splitlines()[0]
    return out


def timed(product: Product) -> float:
    start = time.perf_counter()
    product()
    return time.perf_counter() - start


def take(one: Measured) -> None:
    """One turn of a row: a few calls, each timed. A fast one runs once unmeasured: its neighbour left cold caches."""
    assert one.product is not None
    quick = bool(one.times) and one.times[-1] < 0.1
    with one.row.setting():
        if quick:
            one.product()
        one.times += [timed(one.product) for _ in range(5 if quick else 1)]


def measure(size: str, rows: Sequence[Row], rounds: int) -> list[Measured]:
    """Every row in turn, again and again: what disturbs the machine disturbs all of them."""
    case, exact = Case(size), truth(size)
    out = [prepare(row, case, exact) for row in rows]
    gc.collect()
    gc.disable()
    for turn in range(rounds):
        progress(f"{size}: round {turn + 1} of {rounds}")
        for one in out:
            if one.product and (one.row.width == 1 or turn % WIDE_EVERY == 0):
                take(one)
        gc.collect()
    gc.enable()
    for one in out:
        one.product = None
    return out


def resident(which: str) -> int:
    """Bytes in memory now (VmRSS) or at most (VmHWM)."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in status if line.startswith(which)).split()[1])


def peak(row: Row, size: str) -> int:
    """Bytes above the model and its vectors while a row is set up and multiplies twice, in a process of its own."""
    case, matrix = Case(size), torch.randn(256, 256)
    importlib.import_module(row.needs)
    _ = matrix @ matrix  # the threads are there
    Path("/proc/self/clear_refs").write_text("5")  # the maximum starts from here
    before = resident("VmRSS")
    with row.setting():
        product = row.build(case)
        product(), product()
    return resident("VmHWM") - before


def peak_elsewhere(one: Measured, size: str, threads: int) -> None:
    command = [sys.executable, __file__, "--size", size, "--peak", one.row.name, "--threads", str(threads)]
    progress(f"{size}: memory of {one.row.name}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        one.peak = int(done.stdout.split()[-1])
    else:
        one.failure = "memory: " + (done.stderr.splitlines() or ["no output"])[-1]


# ---- what is printed


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def ratios(one: Measured, out: Sequence[Measured]) -> tuple[float, float] | None:
    """(median ÷ median, minimum ÷ minimum) over the gradient of the same framework."""
    unit = next((u for u in out if u.row.name == one.row.unit and u.times), None)
    return (one.each[0] / unit.each[0], one.each[1] / unit.each[1]) if unit and one.times else None


def line(one: Measured, out: Sequence[Measured]) -> str:
    mark = "*" if one.row.math else "†" if one.row.unit.startswith("JAX") else ""
    text = f"  {one.row.name + mark:<38}"
    if not one.times:
        return f"{text} {one.failure}"
    found = ratios(one, out)
    text += f"{one.each[0] * 1e3:>9.2f}" + (f"{found[0]:>9.2f}{found[1]:>9.2f}" if found else f"{'–':>9}{'–':>9}")
    text += f"{one.setup:>9.2f}" + (f"{one.peak / 2**20:>9.0f}" if one.peak is not None else f"{'–':>9}")
    return text + f"{one.error:>10.0e}" + (f"   {one.failure}" if one.failure else "")


def show(size: str, out: Sequence[Measured]) -> None:
    print(f"\n{size}: GPT with {SIZES[size]}")
    print(f"  {'':<38}{'ms':>9}{'ratio':>9}{'(min)':>9}{'set-up s':>9}{'peak MiB':>9}{'error':>10}")
    heading = ""
    for one in out:
        now = HEADINGS[one.row.matrix, one.row.width]
        if now != heading:
            print(f" {now}")
        heading = now
        print(line(one, out))


NOTES = """
ms      median time for one vector      ratio   to the gradient, of medians and of minima; the latter is judged,
        since the least time of many interleaved ones is what the rest of the machine disturbs least
set-up  seconds to the first answer     error   relative, against float64
peak    memory above model and vectors, set-up included, in a process of its own
*       under SDPBackend.MATH: fused attention cannot be differentiated twice; the gradient divided by is the fused one
†       divided by JAX's own gradient"""


def verdicts(size: str, out: Sequence[Measured]) -> Iterator[tuple[bool, str]]:
    """(met, sentence): each row of ours against its target and against the fastest of the others."""
    rows, by_name = [one.row for one in out], {one.row.name: one for one in out}
    for one in (each for each in out if each.row.ours):
        found = ratios(one, out)
        if found is None:
            yield False, f"{size}: {one.row.name} was not measured. {one.failure}"
            continue
        target = one.row.targets.get(size)
        if target is not None:
            yield found[1] <= target, f"{size}: {one.row.name}: {found[1]:.2f}, target {target}"
        others = [by_name[r.name] for r in one.row.rivals(rows) if by_name[r.name].times]
        if others:
            best = min(others, key=lambda other: other.each[1])
            text = f"{one.each[1] * 1e3:.2f} ms, {best.row.name} {best.each[1] * 1e3:.2f} ms"
            yield one.each[1] < best.each[1], f"{size}: {one.row.name}: {text}"


def environment(threads: int) -> dict[str, Any]:
    versions = {}
    for name in ("torch", "evolute", "pyhessian", "hessian-eigenthings", "curvlinops-for-pytorch", "jax"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    machine = {"machine": platform.machine(), "python": platform.python_version(), "threads": threads}
    return {**machine, "load": round(os.getloadavg()[0], 2), **versions}


def busy(start: float, end: float, threads: int) -> str:
    text = f"load of the machine: {start} at the start, {end} at the end"
    return text if max(start, end - threads) < 1 else f"{text}. Others were computing: repeat this when it is idle."


def record(one: Measured, out: Sequence[Measured]) -> dict[str, Any]:
    found = ratios(one, out)
    return {
        "name": one.row.name, "matrix": one.row.matrix, "vectors": one.row.width, "math_attention": one.row.math,
        "seconds": one.each if one.times else None, "ratio": found, "unit": one.row.unit, "setup": one.setup,
        "peak_bytes": one.peak, "error": one.error, "failure": one.failure, "calls": len(one.times),
    }  # fmt: skip


# ---- the command


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  products.py                                   everything that is installed; ten minutes\n"
        "  products.py --size small --no-peak            one minute\n"
        "  products.py --size large --only evolute jax   two libraries\n"
        "  products.py --check --json table.json         for CI: exit status 1 if a target is missed\n",
    )
    add = parser.add_argument
    add("--size", choices=(*SIZES, "both"), default="both", help="which GPT (default: both)")
    add("--rounds", type=int, help=f"turns of each row (default: {ROUNDS['small']} small, {ROUNDS['large']} large)")
    add("--only", nargs="+", default=[""], metavar="TEXT", help="rows whose names contain one of these, and gradients")
    add("--no-peak", action="store_true", help="leave out the memory column, which starts a process for each row")
    add("--check", action="store_true", help="exit with 1 if a target is missed or another library is faster")
    add("--json", type=Path, metavar="FILE", help="save the numbers, with versions and load of the machine")
    add("--threads", type=int, default=2, help="threads and cores to use (default: 2)")
    add(
        "--peak",
        metavar="ROW",
        choices=[row.name for row in ROWS],
        help="print a row's peak memory in bytes, no more",
    )
    options = parser.parse_args()
    if options.peak and options.size == "both":
        parser.error("--peak measures one row of one model: add --size small or --size large")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: the folder {options.json.absolute().parent} does not exist")
    return options


def confine(threads: int) -> None:
    """Threads of every library; JAX has no setting of its own and goes by the cores that it may use."""
    torch.set_num_threads(threads)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def chosen(only: Sequence[str]) -> list[Row]:
    wanted = [row for row in ROWS if row.matrix == "g" or any(text.lower() in row.name.lower() for text in only)]
    missing = [row.name for row in wanted if not importlib.util.find_spec(row.needs)]
    if missing:
        print(f"not installed, so left out: {', '.join(missing)}  (`make bench` installs all)")
    return [row for row in wanted if row.name not in missing]


def table(size: str, options: argparse.Namespace) -> list[Measured]:
    out = measure(size, chosen(options.only), options.rounds or ROUNDS[size])
    for one in () if options.no_peak else out:
        peak_elsewhere(one, size, options.threads)
    progress("")
    show(size, out)
    return out


def main() -> int:
    options = arguments()
    confine(options.threads)
    warnings.filterwarnings("ignore", module=r"torch\.|pyhessian")  # create_graph=True, and torch's own in linearize
    if options.peak:
        print(peak(next(row for row in ROWS if row.name == options.peak), options.size))
        return 0
    about = environment(options.threads)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    results = {size: table(size, options) for size in (SIZES if options.size == "both" else (options.size,))}
    met = [verdict for size, out in results.items() for verdict in verdicts(size, out)]
    print(NOTES, "", *(f"{'met' if good else 'MISSED':<8}{text}" for good, text in met), sep="\n")
    about["load at the end"] = round(os.getloadavg()[0], 2)
    print("\n" + busy(about["load"], about["load at the end"], options.threads))
    if options.json:
        rows = {size: [record(one, out) for one in out] for size, out in results.items()}
        options.json.write_text(json.dumps({"environment": about, "results": rows}, indent=1))
    return int(options.check and not all(good for good, _ in met))


if __name__ == "__main__":
    sys.exit(main())
