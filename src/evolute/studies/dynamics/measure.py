"""The Hessian at many steps of one training: both ends, trace, negative mass, shares of the blocks, and the edge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from evolute.engine.groups import groups
from evolute.engine.objective import Objective
from evolute.engine.operators import Hessian
from evolute.errors import NonFiniteError
from evolute.krylov.eigen_search import eigsh
from evolute.krylov.one_pass import spectrum
from evolute.krylov.randomness import normal
from evolute.linop.convert import from_matvec
from evolute.studies.blocks import layers
from evolute.studies.dynamics.training import SETUPS, Setup, State, states
from evolute.studies.study import Cell, Row
from evolute.studies.subjects import Moment, Subject, at

REST = "rest"


def measured(cell: Cell) -> list[Row]:
    """Of one training, at all its steps."""
    subject, setup = Subject(**cell["subject"]), SETUPS[cell["setup"]]
    moment = at(subject, 0)
    rate = cell["rate"] if setup.adaptive else cell["rate"] * setup.limit / sharpness(Hessian(moment.objective))
    known = {"model": subject.name, "setup": cell["setup"], "seed": subject.seed}
    rows = list[Row]()
    try:
        for state in states(moment, setup, rate, cell["steps"], subject.steps, cell["batch"]):
            rows.append({"kind": "state", **known, **at_state(moment, setup, state, cell)})
    except NonFiniteError as error:
        return [*rows, {"kind": "diverged", **known, "why": str(error)}]
    return rows


def at_state(moment: Moment, setup: Setup, state: State, cell: Cell) -> Row:
    """`edge` is η λ / limit, λ that of P^-½ H P^-½ for Adam; None as long as it has no P."""
    objective = Objective(state.model, [moment.sample], moment.objective.loss)
    H, generator = Hessian(objective), torch.Generator().manual_seed(cell["subject"]["seed"])
    found = spectrum(H, cell["probes"], cell["products"], k=1, generator=generator, progress=False)
    top = float(found.largest[0])
    seen = top if not setup.adaptive else preconditioned(H, state.preconditioner)
    return {
        "step": state.step,
        "loss": objective.value(),
        "gradient": float(objective.gradient().norm()),
        "rate": state.rate,
        "sharpness": top,
        "sharpness_bound": float(found.largest_bounds[0]),
        "lowest": float(found.smallest[0]),
        "trace": float(found.trace),
        "trace_error": found.trace.standard_error,
        "negative": float(found.negative_mass),
        "negative_error": found.negative_mass.standard_error,
        "edge": None if seen is None else state.rate * seen / setup.limit,
        "shares": shares(H, _parts(state.model), generator, 2),
    }


def sharpness(H: Hessian) -> float:
    """λ_max."""
    generator = torch.Generator().manual_seed(0)
    return float(eigsh(H, 1, "largest", tol=1e-2, generator=generator, progress=False).values[-1])


def preconditioned(H: Hessian, P: Tensor | None) -> float | None:
    """λ_max(P^-½ H P^-½)."""
    if P is None:
        return None
    scale = P.to(H.dtype).rsqrt()
    seen = from_matvec(lambda v: scale * (H @ (scale * v)), space=H.space)
    generator = torch.Generator().manual_seed(0)
    return float(eigsh(seen, 1, "largest", tol=1e-2, generator=generator, progress=False).values[-1])


def shares(H: Hessian, parts: Mapping[str, list[str]], generator: torch.Generator, probes: int) -> dict[str, float]:
    """‖H_:j‖²/‖H‖² of each part j, from E ‖H v_j‖² over random v_j on it alone; all of them in one product."""
    selections = {part: H.space.resolve(names) for part, names in parts.items()}
    like = torch.empty(0, dtype=H.dtype, device=H.device)
    rows = [each.put(normal(probes, each.size, generator, like)) for each in selections.values()]
    squares = (H @ torch.cat(rows).mT).square().sum(0).view(len(parts), probes).mean(1)
    return dict(zip(parts, (squares / squares.sum()).tolist(), strict=True))


def _parts(model: torch.nn.Module) -> dict[str, list[str]]:
    """Letters of weights in all layers, and the rest."""
    out = dict[str, list[str]]()
    for layer in layers(model):
        for letter, name in layer.items():
            out.setdefault("N" if letter in ("N1", "N2") else letter, []).append(name)
    rest = list(_outside(model, {name for names in out.values() for name in names}))
    return out | ({REST: rest} if rest else {})


def _outside(model: torch.nn.Module, known: set[str]) -> Iterator[str]:
    return (name for name in groups(model) if name not in known)
