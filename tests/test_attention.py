"""Attention that differentiates twice, against PyTorch's own composite of plain operations (SDPBackend.MATH)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
import torch.autograd.forward_ad as fwad
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from evolute.engine import attention_tiles
from evolute.engine.attention import attention, score_budget, scores_within
from evolute.errors import ModelError

DOUBLE = torch.float64
Attend = Callable[..., Tensor]
Mode = Callable[["Case", Attend], list[Tensor]]


def math(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **kwargs)


def composed(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, enable_gqa: bool = False) -> Tensor:
    """The same by hand: PyTorch's composite has NaN tangents on rows that see no key."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    added = mask if mask.is_floating_point() else torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    scores = q @ k.mT / q.shape[-1] ** 0.5 + added
    blind = scores.amax(-1, keepdim=True) == -torch.inf
    return torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0) @ v


@pytest.fixture
def many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of a few tokens in many tiles, the last ones ragged."""
    monkeypatch.setattr(attention_tiles, "TILE", 60)
    monkeypatch.setattr(attention_tiles, "ROWS", (3, 3))


class Case:
    """Tensors of one attention, a smooth scalar of its output, and directions for the derivatives."""

    def __init__(
        self,
        q: tuple[int, ...],
        k: tuple[int, ...],
        value: int = 4,
        mask: Tensor | None = None,
        dtype: torch.dtype = DOUBLE,
        **kwargs: Any,
    ) -> None:
        g = torch.Generator().manual_seed(1)
        shapes = [q, k, (*k[:-1], value)]
        self.points = [torch.randn(shape, generator=g, dtype=DOUBLE).to(dtype) for shape in shapes]
        self.kwargs, self.mask = kwargs, mask
        if mask is not None and mask.requires_grad:
            self.points.append(mask.detach())
        self.directions = [torch.randn(x.shape, generator=g, dtype=DOUBLE).to(dtype) for x in self.points]

    def loss(self, attend: Attend) -> Callable[..., Tensor]:
        def loss(*points: Tensor) -> Tensor:
            mask = points[3] if len(points) == 4 else self.mask
            out = attend(*points[:3], mask=mask, **self.kwargs).to(DOUBLE)
            weights = torch.linspace(0.5, 2.0, out.numel(), dtype=DOUBLE).view(out.shape)
            return ((out * weights).sin() + out**2).sum()

        return loss

    @property
    def argnums(self) -> tuple[int, ...]:
        return tuple(range(len(self.points)))

    @property
    def leaves(self) -> list[Tensor]:
        return [x.clone().requires_grad_() for x in self.points]


def value(case: Case, attend: Attend) -> list[Tensor]:
    return [case.loss(attend)(*case.points)]


def gradient(case: Case, attend: Attend) -> list[Tensor]:
    leaves = case.leaves
    return list(torch.autograd.grad(case.loss(attend)(*leaves), leaves))


def reverse_over_reverse(case: Case, attend: Attend) -> list[Tensor]:
    leaves = case.leaves
    slopes = torch.autograd.grad(case.loss(attend)(*leaves), leaves, create_graph=True)
    first = torch.autograd.grad(slopes, leaves, case.directions, retain_graph=True)
    again = torch.autograd.grad(slopes, leaves, case.directions)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    return list(first)


def batched(case: Case, attend: Attend) -> list[Tensor]:
    leaves = case.leaves
    slopes = torch.autograd.grad(case.loss(attend)(*leaves), leaves, create_graph=True)
    several = [torch.stack([d, -2 * d, d.flip(-1)]) for d in case.directions]
    return list(torch.autograd.grad(slopes, leaves, several, is_grads_batched=True))


def forward_over_reverse(case: Case, attend: Attend) -> list[Tensor]:
    slope = torch.func.grad(case.loss(attend), case.argnums)
    return list(torch.func.jvp(slope, tuple(case.points), tuple(case.directions))[1])


def forward_over_reverse_batched(case: Case, attend: Attend) -> list[Tensor]:
    slope = torch.func.grad(case.loss(attend), case.argnums)
    several = tuple(torch.stack([d, -2 * d, d.flip(-1)]) for d in case.directions)
    return list(torch.vmap(lambda *d: torch.func.jvp(slope, tuple(case.points), d)[1])(*several))


def forward_ad(case: Case, attend: Attend) -> list[Tensor]:
    with fwad.dual_level():
        duals = [fwad.make_dual(x, d) for x, d in zip(case.leaves, case.directions, strict=True)]
        slopes = torch.autograd.grad(case.loss(attend)(*duals), duals, create_graph=True)
        return [fwad.unpack_dual(slope).tangent.detach() for slope in slopes]


def forward(case: Case, attend: Attend) -> list[Tensor]:
    return [torch.func.jvp(case.loss(attend), tuple(case.points), tuple(case.directions))[1]]


def reverse_over_forward(case: Case, attend: Attend) -> list[Tensor]:
    def slope(*points: Tensor) -> Tensor:
        return torch.func.jvp(case.loss(attend), points, tuple(case.directions))[1]

    return list(torch.func.grad(slope, case.argnums)(*case.points))


def forward_over_forward(case: Case, attend: Attend) -> list[Tensor]:
    def slope(*points: Tensor) -> Tensor:
        return torch.func.jvp(case.loss(attend), points, tuple(case.directions))[1]

    return [torch.func.jvp(slope, tuple(case.points), tuple(case.directions))[1]]


def hessian(case: Case, attend: Attend) -> list[Tensor]:
    blocks = torch.func.hessian(case.loss(attend), case.argnums)(*case.points)
    return [block for row in blocks for block in row]


MODES = [
    value,
    gradient,
    reverse_over_reverse,
    batched,
    forward_over_reverse,
    forward_over_reverse_batched,
    forward_ad,
    forward,
    reverse_over_forward,
    hessian,
]


def assert_same(mine: list[Tensor], theirs: list[Tensor], within: float = 1e-12) -> None:
    for x, y in zip(mine, theirs, strict=True):
        assert x.shape == y.shape and x.isfinite().all()
        if not x.numel():
            continue
        assert (x - y).abs().max() <= within * max(1.0, float(y.abs().max()))


def lowest(mask: Tensor, dtype: torch.dtype = DOUBLE) -> Tensor:
    """A boolean mask as Hugging Face adds it to the scores."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def padded(*lengths: int, keys: int) -> Tensor:
    """(B, 1, 1, S), True where a sequence of that length, padded on the left, has a token."""
    return (torch.arange(keys) >= keys - torch.tensor(lengths)[:, None])[:, None, None]


CAUSAL = torch.ones(5, 5, dtype=torch.bool).tril()
# Left padding under a causal mask: the first rows of the shorter sequence see no key at all.
BLIND = padded(5, 3, keys=5) & CAUSAL
FULL = (2, 2, 5, 3)

CASES: dict[str, Callable[[], Case]] = {
    "plain": lambda: Case(FULL, FULL, 3),
    "causal": lambda: Case(FULL, FULL, 3, is_causal=True),
    "scale": lambda: Case(FULL, FULL, 3, is_causal=True, scale=0.3),
    "other value size": lambda: Case(FULL, FULL, 2, is_causal=True),
    "more keys": lambda: Case((2, 2, 4, 3), (2, 2, 7, 3), 3),
    "more keys, causal": lambda: Case((2, 2, 4, 3), (2, 2, 7, 3), 3, is_causal=True),
    "more queries, causal": lambda: Case((1, 2, 7, 3), (1, 2, 4, 3), 3, is_causal=True),
    "three axes": lambda: Case((3, 5, 3), (3, 5, 3), 3, is_causal=True),
    "two axes": lambda: Case((5, 3), (4, 3), 3),
    "five axes": lambda: Case((2, 1, 2, 4, 3), (2, 1, 2, 4, 3), 3, is_causal=True),
    "broadcast batch": lambda: Case((2, 2, 4, 3), (1, 2, 4, 3), 3),
    "one key head": lambda: Case((2, 3, 4, 3), (2, 1, 4, 3), 3),
    "grouped": lambda: Case((2, 4, 5, 3), (2, 2, 5, 3), 3, is_causal=True, enable_gqa=True),
    "grouped, masked": lambda: Case((2, 4, 5, 3), (2, 2, 5, 3), 3, mask=BLIND, enable_gqa=True),
    "boolean": lambda: Case(
        FULL, FULL, 3, mask=torch.rand(2, 2, 5, 5, generator=torch.Generator().manual_seed(3)) > 0.4
    ),
    "padding": lambda: Case(FULL, FULL, 3, mask=padded(5, 3, keys=5)),
    "padding, three axes": lambda: Case((2, 5, 3), (2, 5, 3), 3, mask=padded(5, 3, keys=5)[:, 0]),
    "row mask": lambda: Case(FULL, FULL, 3, mask=torch.tensor([True, False, True, True, True])),
    "blind rows": lambda: Case(FULL, FULL, 3, mask=BLIND),
    "blind rows, added": lambda: Case(
        FULL, FULL, 3, mask=torch.zeros(BLIND.shape, dtype=DOUBLE).masked_fill(~BLIND, -torch.inf)
    ),
    "blind rows, lowest": lambda: Case(FULL, FULL, 3, mask=lowest(BLIND)),
    "blind rows, -1e4": lambda: Case(FULL, FULL, 3, mask=lowest(BLIND).clamp(min=-1e4)),
    "float32 mask": lambda: Case(FULL, FULL, 3, mask=lowest(BLIND, torch.float32)),
    "bias": lambda: Case(FULL, FULL, 3, mask=torch.randn(1, 2, 5, 5, dtype=DOUBLE).requires_grad_()),
    "bias for all": lambda: Case(FULL, FULL, 3, mask=torch.randn(5, 5, dtype=DOUBLE).requires_grad_(), is_causal=False),
    "bias of keys": lambda: Case(FULL, FULL, 3, mask=torch.randn(2, 1, 1, 5, dtype=DOUBLE).requires_grad_()),
    "bias, grouped": lambda: Case(
        (2, 4, 5, 3), (2, 2, 5, 3), 3, mask=torch.randn(4, 5, 1, dtype=DOUBLE).requires_grad_(), enable_gqa=True
    ),
    "bias with blind rows": lambda: Case(
        FULL, FULL, 3, mask=(torch.randn(2, 2, 5, 5, dtype=DOUBLE) + lowest(BLIND)).requires_grad_()
    ),
}


def check(name: str, mode: Mode) -> None:
    case = CASES[name]()
    expected = mode(case, math)
    if not all(x.isfinite().all() for x in expected):
        assert case.mask is not None and case.kwargs.keys() <= {"enable_gqa"}
        expected = mode(case, composed)
    assert_same(mode(case, attention), expected)


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("name", CASES)
def test_streamed(name: str, mode: Mode) -> None:
    with scores_within(0):
        check(name, mode)


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("mode", [batched, forward_over_reverse], ids=lambda m: m.__name__)
@pytest.mark.parametrize("name", CASES)
def test_kept(name: str, mode: Mode) -> None:
    with scores_within(1 << 30):
        check(name, mode)


@pytest.mark.parametrize("name", CASES)
def test_in_one_tile(name: str) -> None:
    check(name, batched)
    check(name, reverse_over_reverse)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    B, J, G, E, F_ = (draw(st.integers(1, 3)) for _ in range(5))
    T, S = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    mask = None
    if draw(st.booleans()):
        shape = [draw(st.sampled_from([1, size])) for size in (B, J * G, T, S)]
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) > 0.3
        mask = draw(st.sampled_from([mask, lowest(mask), torch.randn(shape, dtype=DOUBLE).requires_grad_()]))
    causal = mask is None and draw(st.booleans())
    return Case((B, J * G, T, E), (B, J, S, E), F_, mask, enable_gqa=True, **({"is_causal": True} if causal else {}))


@hypothesis.given(cases(), st.sampled_from([0, 1 << 30]), st.integers(1, 9), st.integers(1, 400))
def test_any_shape_mask_and_tiling(case: Case, budget: int, rows: int, tile: int) -> None:
    with pytest.MonkeyPatch.context() as patch, scores_within(budget):
        patch.setattr(attention_tiles, "TILE", tile)
        patch.setattr(attention_tiles, "ROWS", (rows, rows))
        for mode in (value, gradient, reverse_over_reverse, batched, forward_over_reverse):
            assert_same(mode(case, attention), mode(case, math))


# The operators -------------------------------------------------------------------------------------------------------


def ingredients(n: int | None = None) -> dict[str, Any]:
    """The arguments of the second-order operator, in its order."""
    B, H, J, T, S, E = 2, 4, 2, 5, 7, 3
    lead = () if n is None else (n,)
    shapes = {"q": (B, H, T, E), "k": (B, J, S, E), "v": (B, J, S, E), "mask": (1, H, T, S)}
    pairs = zip("abcm", shapes.values(), strict=True)
    vectors = {name: torch.randn(*lead, *shape, dtype=DOUBLE) for name, shape in pairs}
    points = {name: torch.randn(shape, dtype=DOUBLE) for name, shape in shapes.items()}
    u = torch.randn(B, H, T, E, dtype=DOUBLE)
    return vectors | points | {"u": u, "P": None, "dS": None, "causal": True, "scale": 0.6, "wanted": "qkvmu"}


def second_order(**given: Any) -> tuple[Tensor, ...]:
    return torch.ops.evolute.attention_second_order(*given.values())


def keep(**given: Any) -> dict[str, Tensor]:
    arguments = (given[name] for name in ("u", "q", "k", "v", "mask", "causal", "scale"))
    return dict(zip(("P", "dS"), torch.ops.evolute.attention_keep(*arguments, "")[4:], strict=True))


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("wanted", ["q", "k", "v", "m", "u", "qk", "vu", "qkvu"])
def test_what_is_not_wanted_is_left_out(wanted: str) -> None:
    given = ingredients()
    everything, some = second_order(**given), second_order(**given | {"wanted": wanted})
    for letter, whole, part in zip("qkvmu", everything, some, strict=True):
        assert torch.equal(part, whole) if letter in wanted else not part.numel()


@pytest.mark.usefixtures("many_tiles")
def test_kept_is_streamed_to_the_last_bit() -> None:
    given = ingredients()
    for x, y in zip(second_order(**given), second_order(**given | keep(**given)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("absent", ["a", "b", "c", "m", "ab", "abm", "bcm"])
def test_a_missing_vector_is_zero(absent: str) -> None:
    given = ingredients()
    none = given | dict.fromkeys(absent)
    zero = given | {name: torch.zeros_like(given[name]) for name in absent}
    assert_same(list(second_order(**none)), list(second_order(**zero)))


def test_the_second_derivative_is_symmetric() -> None:
    """<x, H y> = <y, H x> for the Hessian of <u, attention> in (q, k, v, mask)."""
    x = ingredients()
    y = x | {name: torch.randn_like(x[name]) for name in "abcm"}
    Hx, Hy = second_order(**x), second_order(**y)

    def inner(given: dict[str, Any], parts: tuple[Tensor, ...]) -> float:
        return sum(float((given[name] * part).sum()) for name, part in zip("abcm", parts, strict=False))

    assert inner(y, Hx) == pytest.approx(inner(x, Hy))


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("n", [None, 3])
@pytest.mark.parametrize(
    "batched_names", ["abcm", "ac", "abcmq", "abcmu", "u", "kv", "abcmqkvu", ("mask",), ("a", "mask")]
)
def test_vmap_of_the_product(batched_names: Any, n: int | None, kept: bool) -> None:
    given = ingredients(n)
    given |= keep(**given) if kept and not set(batched_names) & {"q", "k", "v", "mask", "u"} else {}
    several = {name: torch.stack([given[name], -given[name], given[name] * 0.5]) for name in batched_names}
    got = torch.vmap(lambda some: second_order(**given | some))(several)
    for i in range(3):
        expected = second_order(**given | {name: x[i] for name, x in several.items()})
        assert_same([part[i] for part in got], list(expected))


@pytest.mark.parametrize("names", ["u", "uq", "qkv"])
@pytest.mark.parametrize("n", [None, 2])
def test_vmap_of_the_gradient(names: str, n: int | None) -> None:
    given = ingredients()
    u = given["u"] if n is None else torch.stack([given["u"]] * n)
    out, lse = torch.ops.evolute.attention(*(given[name] for name in ("q", "k", "v", "mask", "causal", "scale")))
    base = {name: given[name] for name in ("q", "k", "v")} | {"u": u, "out": out, "lse": lse}

    def gradient(some: dict[str, Tensor], mask: Tensor | None, wanted: str) -> tuple[Tensor, ...]:
        x = base | some
        tensors = (x["u"], x["q"], x["k"], x["v"], mask, x["out"], x["lse"], None, None)
        return torch.ops.evolute.attention_backward(*tensors, True, 0.6, wanted)

    # Where q changes, out and logsumexp change with it: ours, which has no use for them, is what can be compared.
    wanted, mask = ("qkv", None) if names == "u" else ("qkvm", given["mask"])
    several = {name: torch.stack([base[name], 0.5 * base[name]]) for name in names}
    got = torch.vmap(lambda some: gradient(some, mask, wanted))(several)
    for i in range(2):
        assert_same([x[i] for x in got], list(gradient({name: x[i] for name, x in several.items()}, mask, wanted)))


class Seen(TorchDispatchMode):
    """The operators that a recorder of operations sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).removesuffix(".default"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("budget", [0, 1 << 30])
def test_a_recorder_sees_one_operator_each(budget: int) -> None:
    case = CASES["causal"]()
    leaves = case.leaves
    with scores_within(budget), Seen() as primal:
        slopes = torch.autograd.grad(case.loss(attention)(*leaves), leaves, create_graph=True)
    with Seen() as product:
        torch.autograd.grad(slopes, leaves, case.directions)
    mine = [name for name in product.names if name.startswith("evolute")]
    assert mine == ["evolute.attention_second_order", "evolute.attention_backward"]
    assert ("evolute.attention_keep" in primal.names) == (budget > 0)
    assert not [name for name in product.names if "softmax" in name or "bmm" in name]


# Elsewhere -----------------------------------------------------------------------------------------------------------


def test_gradgradcheck() -> None:
    bias = torch.randn(2, 3, 1, dtype=DOUBLE).requires_grad_()
    points = [x.requires_grad_() for x in Case((1, 2, 3, 2), (1, 1, 2, 2), 1, bias).points]

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attention(q, k, v, mask=mask, enable_gqa=True)

    assert torch.autograd.gradcheck(attend, points, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(attend, points, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.parametrize("name", ["causal", "grouped, masked", "bias"])
def test_third_derivatives(name: str) -> None:
    case = CASES[name]()
    directions = tuple(case.directions)

    def reverse(attend: Attend) -> list[Tensor]:
        leaves = case.leaves
        slopes = torch.autograd.grad(case.loss(attend)(*leaves), leaves, create_graph=True)
        bends = torch.autograd.grad(slopes, leaves, case.directions, create_graph=True)
        return list(torch.autograd.grad(bends, leaves, case.directions))

    def forward(attend: Attend) -> list[Tensor]:
        slope = torch.func.grad(case.loss(attend), case.argnums)
        bend = lambda *points: torch.func.jvp(slope, points, directions)[1]  # noqa: E731
        return list(torch.func.jvp(bend, tuple(case.points), directions)[1])

    def batched(attend: Attend) -> list[Tensor]:
        blocks = torch.func.jacrev(torch.func.jacrev(case.loss(attend), case.argnums), case.argnums)(*case.points)
        return [block for row in blocks for block in row]

    for derivative in (reverse, forward, batched):
        assert_same(derivative(attention), derivative(math if case.mask is None else by_hand(case)), 1e-11)


def by_hand(case: Case) -> Attend:
    return math if case.mask is None or case.mask.requires_grad else composed


def test_a_fourth_forward_derivative_is_refused_not_zero() -> None:
    case = CASES["causal"]()
    function: Any = torch.func.grad(case.loss(attention), 0)
    for _ in range(3):
        function = along(function, case)
    with pytest.raises(Exception, match=r"jvp|forward"):
        function(*case.points)


def along(function: Any, case: Case) -> Any:
    return lambda *points: torch.func.jvp(function, points, tuple(case.directions))[1]


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 1), (1, None, 0)])
def test_vmap_over_samples(in_dims: tuple[int | None, ...]) -> None:
    shape = (3, 2, 4, 3)
    points = [torch.randn(shape, dtype=DOUBLE) for _ in range(3)]
    points = [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(points, in_dims, strict=True)]

    def product(attend: Attend) -> Callable[..., Any]:
        def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, is_causal=True).sin().sum()

        def bend(*x: Tensor) -> Any:
            return torch.func.jvp(torch.func.grad(loss, (0, 1, 2)), x, tuple(torch.ones_like(y) for y in x))

        return torch.vmap(bend, in_dims)

    mine, theirs = product(attention)(*points), product(math)(*points)
    assert_same([*mine[0], *mine[1]], [*theirs[0], *theirs[1]])


@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "mode", [value, gradient, reverse_over_reverse, forward_over_reverse], ids=lambda mode: mode.__name__
)
def test_lower_precision(dtype: torch.dtype, within: float, mode: Mode) -> None:
    """A few roundings of what goes in and out; the sums over 200 keys are in float32."""
    shape = (1, 2, 200, 8)
    low = Case(shape, shape, 8, dtype=dtype, is_causal=True)
    exact = Case(shape, shape, 8, is_causal=True)
    exact.points, exact.directions = [x.double() for x in low.points], [x.double() for x in low.directions]
    for mine, theirs in zip(mode(low, attention), mode(exact, math), strict=True):
        assert (mine - theirs).norm() <= within * theirs.norm()


def test_lowest_masks_of_float32() -> None:
    """Rows that are masked everywhere weigh all keys alike; PyTorch's fused gradient weighs each by 1."""
    shape = (2, 2, 5, 8)
    case = Case(shape, shape, 8, lowest(BLIND, torch.float32), dtype=torch.float32)
    for mode in (gradient, reverse_over_reverse, forward_over_reverse):
        assert_same(mode(case, attention), mode(case, math), 1e-5)


def test_under_autocast_as_pytorch() -> None:
    q, k, v = (torch.randn(1, 2, 6, 4, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = attention(q, k, v), math(q, k, v)
        slopes = torch.autograd.grad(mine.float().sin().sum(), (q, k, v), create_graph=True)
        bends = torch.autograd.grad(slopes, (q, k, v), [torch.ones_like(x) for x in slopes])
    assert mine.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(mine, theirs, atol=1e-2, rtol=1e-2)
    assert all(x.dtype == torch.float32 and x.isfinite().all() for x in (*slopes, *bends))


def test_any_strides() -> None:
    case = CASES["causal"]()
    scattered = CASES["causal"]()
    scattered.points = [x.mT.contiguous().mT for x in case.points]
    assert scattered.points[0].stride(-1) != 1
    assert_same(reverse_over_reverse(scattered, attention), reverse_over_reverse(case, math))


@pytest.mark.parametrize(
    ("q", "k"), [((2, 2, 3, 4), (2, 2, 0, 4)), ((2, 2, 0, 4), (2, 2, 3, 4)), ((0, 2, 3, 4), (0, 2, 3, 4))]
)
def test_nothing_to_attend_to(q: tuple[int, ...], k: tuple[int, ...]) -> None:
    case = Case(q, k, 4)
    assert_same(reverse_over_reverse(case, attention), [torch.zeros_like(x) for x in case.points])


def test_both_a_mask_and_causal_means_both() -> None:
    q, k, v = CASES["causal"]().points
    mask = padded(5, 4, keys=5)
    torch.testing.assert_close(attention(q, k, v, mask=mask, is_causal=True), math(q, k, v, mask=mask & CAUSAL))


def test_the_budget_is_of_one_context() -> None:
    seen: list[int] = []
    with scores_within(5):
        with scores_within(7):
            thread = threading.Thread(target=lambda: seen.append(score_budget.get()))
            thread.start()
            thread.join()
            assert score_budget.get() == 7
        assert score_budget.get() == 5
    assert score_budget.get() == seen[0] == 64 << 20


def test_tiles_stay_small_however_long_the_sequence() -> None:
    for T in (512, 4096, 16384):
        shape = attention_tiles.Shape(1, 12, 1, T, T)
        assert max(spot.size for spot in attention_tiles.spots(shape, True, 1 << 19)) <= max(1 << 19, 64 * T)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.randn(2, 2, 5, 4)}, "query and key of one size"),
        ({"v": torch.randn(2, 2, 6, 3)}, "key and value of one length"),
        ({"k": torch.randn(2, 3, 5, 3)}, "head axes"),
        ({"k": torch.randn(3, 2, 5, 3)}, "batch axes"),
        ({"q": torch.randn(3)}, "shape"),
        ({"q": torch.randn(2, 2, 5, 3).double()}, "one dtype"),
        ({name: torch.ones(2, 2, 5, 3, dtype=torch.int64) for name in "qkv"}, "floating point"),
        ({"mask": torch.ones(5, 5, dtype=torch.int64)}, "boolean"),
        ({"mask": torch.ones(4, 5)}, "broadcast"),
        ({"mask": torch.ones(1, 2, 2, 5, 5)}, "broadcast"),
    ],
)
def test_what_is_refused(change: dict[str, Tensor], message: str) -> None:
    given = {name: torch.randn(2, 2, 5, 3) for name in "qkv"} | change
    with pytest.raises(ModelError, match=message):
        attention(given["q"], given["k"], given["v"], mask=given.get("mask"))
