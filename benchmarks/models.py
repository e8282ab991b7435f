"""The two GPTs whose curvature products are timed, and how each library is asked for one; the same GPTs in JAX.

Sizes: B sequences of L tokens, width d, h heads, vocabulary V.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    import jax

Product = Callable[[], Any]  # a row of the table, set up: what is timed
VOCABULARY = 256  # bytes
WIDE = 16  # vectors, where several are multiplied at once


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    length: int
    batch: int = 8

    def __str__(self) -> str:
        return f"{self.layers} layers, d={self.width}, {self.heads} heads, L={self.length}, B={self.batch}"


SIZES = {"small": Size(2, 64, 4, 32), "large": Size(4, 256, 8, 128)}


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self._attention(self.qkv(self.norm1(x))))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def _attention(self, qkv: Tensor) -> Tensor:
        batch, length, _ = qkv.shape
        q, k, v = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # each (B, h, L, d/h)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, -1)  # (B, L, d)


class GPT(nn.Module):
    """Tokens (B, L) → logits (B·L, V)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList([Block(size.width, size.heads) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


def make(size: Size, seed: int = 0) -> tuple[GPT, Tensor, Tensor]:
    """A randomly initialised model, its tokens (B, L) and its targets (B·L,)."""
    torch.manual_seed(seed)
    shape = size.batch, size.length
    return GPT(size), torch.randint(VOCABULARY, shape), torch.randint(VOCABULARY, shape).flatten()


class Case:
    """One model on one batch, and the vectors: `v` (P,), `rows` (16, P), of which the first is v."""

    def __init__(self, size: str, dtype: torch.dtype = torch.float32) -> None:
        self.size = SIZES[size]
        self.original, self.x, self.y = make(self.size)
        count = sum(p.numel() for p in self.original.parameters())
        self.rows = torch.randn(WIDE, count).to(dtype)
        self.original.to(dtype)
        self.v, self.loss = self.rows[0], nn.CrossEntropyLoss()
        self.names = [name for name, _ in self.original.named_parameters()]

    def model(self) -> nn.Module:
        """A copy for each row: some libraries leave gradients or graphs behind."""
        return copy.deepcopy(self.original)

    def pieces(self, rows: Tensor) -> tuple[Tensor, ...]:
        """(…, P) → one (…, *shape) for each parameter."""
        shapes = [p.shape for p in self.original.parameters()]
        parts = rows.split([shape.numel() for shape in shapes], dim=-1)
        return tuple(part.reshape(*rows.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True))

    def flat(self, result: Any) -> Tensor:
        """What a row returned, as (k, P) in float64."""
        if isinstance(result, Tensor):
            return (result.T if result.ndim == 2 else result[None]).detach().double()
        result = [result[name] for name in self.names] if isinstance(result, dict) else result
        parts = [part.detach() if isinstance(part, Tensor) else torch.tensor(part.__array__()) for part in result]
        k = parts[0].numel() // self.original.tokens.weight.numel()
        return torch.cat([part.reshape(k, -1) for part in parts], dim=1).double()

    def objective(self, model: nn.Module) -> Callable[..., Tensor]:
        """The loss as a function of the parameters, for torch.func."""
        return lambda *p: self.loss(self.logits(model, *p), self.y)

    def logits(self, model: nn.Module, *p: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(self.names, p, strict=True)), (self.x,))


def truth(size: str) -> dict[str, Tensor]:
    """g and G v, and H times the first and the last vector: float64, plain autograd."""
    case = Case(size, torch.float64)
    model = case.model()
    p = list(model.parameters())
    with sdpa_kernel(SDPBackend.MATH):
        logits = model(case.x)
        loss = case.loss(logits, case.y)
        g, dual = torch.autograd.grad(loss, p, create_graph=True), torch.zeros_like(logits, requires_grad=True)
        hessian = [torch.autograd.grad(g, p, case.pieces(v), retain_graph=True) for v in (case.v, case.rows[-1])]
        transposed = torch.autograd.grad(logits, p, dual, create_graph=True)  # Jᵀu: linear in u
        moved = torch.autograd.grad(transposed, dual, case.pieces(case.v), retain_graph=True)[0]
        slope = torch.autograd.grad(loss, logits, create_graph=True)[0]
        bent = torch.autograd.grad(slope, logits, moved, retain_graph=True)[0]
        gauss = torch.autograd.grad(logits, p, bent)
    return {"g": case.flat(g), "H": torch.cat([case.flat(h) for h in hessian]), "G": case.flat(gauss)}


def off(case: Case, result: Any, exact: Tensor) -> float:
    """Relative error, the larger one of the first and the last vector."""
    rows = case.flat(result)[[0, -1]]
    exact = exact[:1].expand(2, -1) if len(rows.unique(dim=0)) == 1 else exact
    return float(((rows - exact).norm(dim=1) / exact.norm(dim=1)).max())


# ---- how each library is asked: set up once, and the function that is timed


def gradient(case: Case) -> Product:
    model = case.model()
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(case.loss(model(case.x), case.y), parameters)


def evolute(operator: str, case: Case, vector: str = "v", memory: int | None = None) -> Product:
    import evolute as ev

    A = getattr(ev, operator)(ev.Objective(case.model(), [(case.x, case.y)], case.loss, memory=memory))
    v = case.v if vector == "v" else case.rows.T
    return lambda: A @ v


def pyhessian(case: Case) -> Product:
    from pyhessian import hessian
    from pyhessian.utils import hessian_vector_product

    H, v = hessian(case.model(), case.loss, data=(case.x, case.y), cuda=False), case.pieces(case.v)
    return lambda: hessian_vector_product(H.gradsH, H.params, v)


def eigenthings(operator: str, case: Case) -> Product:
    import hessian_eigenthings as he

    model, batches = case.model(), [(case.x, case.y)]
    if operator == "Hessian":
        H = he.HessianOperator(model, batches, he.supervised_loss(case.loss))
        return lambda: H @ case.v
    G = he.GGNOperator(model, batches, he.supervised_forward, he.supervised_loss_of_output(case.loss))
    return lambda: G @ case.v


def curvlinops(operator: str, case: Case, vector: str = "v") -> Product:
    import curvlinops as cl

    model, made = case.model(), {"Hessian": cl.HessianLinearOperator, "GGN": cl.GGNLinearOperator}[operator]
    A = made(model, case.loss, list(model.parameters()), [(case.x, case.y)], check_deterministic=False)
    v = case.v if vector == "v" else case.rows.T.contiguous()
    return lambda: A @ v


def func_jvp(case: Case) -> Product:
    model, p, v = case.model(), tuple(q.detach() for q in case.original.parameters()), case.pieces(case.v)
    grad = torch.func.grad(case.objective(model), argnums=tuple(range(len(p))))
    return lambda: torch.func.jvp(grad, p, v)[1]


def func_linearize(case: Case, vector: str = "v") -> Product:
    model, p = case.model(), tuple(q.detach() for q in case.original.parameters())
    _, product = torch.func.linearize(torch.func.grad(case.objective(model), argnums=tuple(range(len(p)))), *p)
    v = case.pieces(getattr(case, vector))
    wide = product if vector == "v" else torch.vmap(product)
    return lambda: wide(*v)


def kept_graph(case: Case) -> Product:
    model, v = case.model(), case.pieces(case.v)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(case.loss(model(case.x), case.y), parameters, create_graph=True)
    return lambda: torch.autograd.grad(gradients, parameters, v, retain_graph=True)


# ---- the same in JAX; parameters by their PyTorch names


def jax_loss(size: Size, parameters: dict[str, jax.Array], tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy of the same GPT."""
    import jax

    p, positions = parameters, parameters["positions.weight"]
    x = p["tokens.weight"][tokens] + positions[: tokens.shape[1]]
    for index in range(size.layers):
        x = _jax_block(size.heads, {k.split(".", 2)[2]: v for k, v in p.items() if k.startswith(f"blocks.{index}.")}, x)
    logits = _jax_norm(x, p["norm.weight"], p["norm.bias"]) @ p["head.weight"].T
    logged = jax.nn.log_softmax(logits.reshape(-1, VOCABULARY))
    return -jax.numpy.take_along_axis(logged, targets[:, None], axis=1).mean()


def _jax_block(heads: int, p: dict[str, Any], x: jax.Array) -> jax.Array:
    import jax

    qkv = _jax_norm(x, p["norm1.weight"], p["norm1.bias"]) @ p["qkv.weight"].T + p["qkv.bias"]
    x = x + _jax_attention(heads, qkv) @ p["out.weight"].T + p["out.bias"]
    hidden = _jax_norm(x, p["norm2.weight"], p["norm2.bias"]) @ p["up.weight"].T + p["up.bias"]
    return x + jax.nn.gelu(hidden, approximate=False) @ p["down.weight"].T + p["down.bias"]


def _jax_attention(heads: int, qkv: jax.Array) -> jax.Array:
    import jax
    import jax.numpy as jnp

    batch, length, _ = qkv.shape
    q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, heads, -1), 2, 0)  # each (B, L, h, d/h)
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones((length, length), dtype=bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("bhlm,bmhd->blhd", weights, v).reshape(batch, length, -1)


def _jax_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    import jax

    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def in_jax(case: Case) -> tuple[Callable[..., Any], dict[str, jax.Array], dict[str, jax.Array]]:
    """The gradient as a function of the parameters, the parameters, and the vector."""
    import jax

    here = lambda tensor: jax.numpy.asarray(tensor.detach().numpy())  # noqa: E731
    parameters = {name: here(p) for name, p in case.original.named_parameters()}
    vector = dict(zip(case.names, map(here, case.pieces(case.v)), strict=True))
    return jax.grad(lambda p: jax_loss(case.size, p, here(case.x), here(case.y))), parameters, vector


def jax_gradient(case: Case) -> Product:
    import jax

    grad, parameters, _ = in_jax(case)
    compiled = jax.jit(grad)
    return lambda: jax.block_until_ready(compiled(parameters))


def jax_linearize(case: Case) -> Product:
    import jax

    grad, parameters, v = in_jax(case)
    product = jax.jit(jax.linearize(grad, parameters)[1])
    return lambda: jax.block_until_ready(product(v))
