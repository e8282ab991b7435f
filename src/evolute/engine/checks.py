"""What a product has to satisfy to be believed: one point, finite, symmetric, and the replay equal to autograd."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.graph import Node

from evolute.engine.objective import Objective
from evolute.engine.tape import Tape, Unrecordable
from evolute.errors import ModelError, NonFiniteError, TooLargeError

Pieces = Sequence[Tensor | None]
Product = tuple[Sequence[Tensor], Pieces]  # a vector, and the operator times it


class Point:
    """The parameters and buffers as they are now.

    Version counters notice every change but those through `.data`; the norms of differentiated parameters find these.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective, self.late = objective, Late()
        self.versions, self.norms = self._versions(), self._norms()

    def check(self) -> None:
        if self.versions != self._versions() or self.late((self.norms != self._norms()).any()):
            raise ModelError(
                "the parameters or buffers have changed since this operator was made, and an operator belongs to one "
                "point. Make a new one, which is cheap: ev.Hessian(objective)."
            )

    def _versions(self) -> tuple[tuple[int, int], ...]:
        model = self.objective.model
        return tuple((t._version, t.data_ptr()) for t in chain(model.parameters(), model.buffers()))  # pyright: ignore

    def _norms(self) -> Tensor:
        with torch.no_grad():
            norms = torch._foreach_norm(list(self.objective.parameters.values()))  # pyright: ignore
            return torch.stack(norms).nan_to_num()


class Late:
    """Whether a flag is up. On a GPU it is read when it has arrived, some products later: the host does not wait."""

    def __init__(self) -> None:
        self.on_the_way: list[tuple[torch.cuda.Event, Tensor]] = []

    def __call__(self, flag: Tensor) -> bool:
        if flag.device.type != "cuda":
            return bool(flag)
        host, event = torch.empty((), dtype=torch.bool, pin_memory=True), torch.cuda.Event()
        host.copy_(flag, non_blocking=True)
        event.record()
        self.on_the_way.append((event, host))
        here = [host for event, host in self.on_the_way if event.query()]
        self.on_the_way = self.on_the_way[len(here) :]
        return any(map(bool, here))


@contextmanager
def explained(index: int) -> Generator[None]:
    """PyTorch's own errors about derivatives and memory, in terms of what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TooLargeError(
            f"out of memory at batch {index}: {error}. Use smaller batches, or less `memory`."
        ) from error
    except (NotImplementedError, RuntimeError) as error:
        text = str(error)
        if isinstance(error, NonFiniteError | TooLargeError) or not _about_derivatives(text):
            raise
        raise ModelError(
            f"the model uses an operation that PyTorch cannot differentiate twice: {text.splitlines()[0]} Replace it "
            "by one that can (nn.Embedding(sparse=False), another activation), or write it in basic operations."
        ) from error


def _about_derivatives(text: str) -> bool:
    marks = (
        "derivative for",
        "not implemented for",
        "double backward",
        "not differentiable",
        "SparseTensorImpl",
        "sparse",
    )
    return any(mark in text for mark in marks)


def check_differentiable_again(gradients: Pieces, inputs: Sequence[Tensor]) -> None:
    """No function on the way is `once_differentiable`: PyTorch cuts the graph there and says so to `.backward()` only.

    `torch.autograd.grad` would find zeros behind the cut: a node of the kind Error that leads to copies of its own.
    """
    known = {id(each) for each in inputs}
    for node in _graph(gradients):
        after = [one for one, _ in node.next_functions if one is not None]
        leaves = [getattr(one, "variable", None) for one in after]
        if node.name() == "torch::autograd::Error" and after and not any(x is None or id(x) in known for x in leaves):
            raise ModelError(
                "the model uses an operation that PyTorch cannot differentiate twice: an autograd.Function whose "
                "backward pass is once_differentiable, so that its second derivative would be left out. Write that "
                "backward pass in operations that can be differentiated, or take the function out."
            )


def _graph(tensors: Pieces) -> Generator[Node]:
    """Every node that these come from, once."""
    waiting, seen = [each.grad_fn for each in tensors if each is not None], set[Node]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [one for one, _ in node.next_functions]
            yield node


def check_finite_product(index: int, pieces: Pieces, given: Tensor | None = None) -> None:
    """Of a given vector that is itself not finite, no finite product is asked."""
    for piece in pieces:
        if piece is not None and not _finite(piece) and (given is None or _finite(given)):
            raise NonFiniteError(
                f"the second derivative of batch {index} is not finite, though loss and gradient are: a kink, a power "
                "below two at zero, or an overflow in this dtype."
            )


def _finite(piece: Tensor) -> bool:
    return bool(torch.isfinite(piece.sum())) or bool(torch.isfinite(piece).all())


def check_product(index: int, first: Product, second: Product) -> None:
    """Finite, and ⟨u, A v⟩ = ⟨v, A u⟩: an operation whose second derivative is wrong would show here."""
    for _, product in (first, second):
        check_finite_product(index, product)
    (u, a_u), (v, a_v) = first, second
    gap, size = abs(_dot(u, a_v) - _dot(v, a_u)), _dot(a_u, a_u) ** 0.5
    eps = max(torch.finfo(each.dtype).eps for each in (*u, *(a for a in a_u if a is not None)))
    if gap > 30 * eps**0.5 * size * max(1.0, len(u) ** 0.5):
        raise ModelError(
            f"the second derivative of batch {index} is not symmetric (off by {gap / max(size, 1e-300):.1e} of its "
            "size): an operation of the model has a wrong second derivative in PyTorch (nn.utils.weight_norm has)."
        )


def _dot(left: Pieces, right: Pieces) -> float:
    pairs = zip(left, right, strict=True)
    return sum(
        float((a.detach().double() * b.detach().double()).sum()) for a, b in pairs if a is not None and b is not None
    )


def check_replay(run: Callable[..., Pieces], tape: Tape, probe: Sequence[Tensor], direct: Pieces) -> None:
    """A tape is used only if it agrees with autograd on a vector that it was not recorded with."""
    with torch.no_grad():
        try:
            replayed = run(*probe)
        except RuntimeError as error:
            raise Unrecordable(f"the replay failed ({error})") from error
    zero = torch.zeros((), device=probe[0].device)
    gap, size = 0.0, 0.0
    for ours, theirs in zip(replayed, direct, strict=True):
        mine, other = (zero if each is None else each.detach().double() for each in (ours, theirs))
        gap, size = gap + float((mine - other).square().sum()), size + float(other.square().sum())
    floats = {meta.dtype for meta in tape.meta.values() if meta.dtype.is_floating_point}
    eps = max(torch.finfo(dtype).eps for dtype in floats)
    if not gap <= eps * size:  # a relative error of √eps of the coarsest number on the way
        raise Unrecordable(f"the replay is off by {(gap / max(size, 1e-300)) ** 0.5:.1e} relative")
