"""The same GPT in JAX, with the parameters of the PyTorch one under their names."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from evolute.cli.bench.problem import HEADS, Problem

Parameters = dict[str, Any]


def with_jax(problem: Problem) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[Tensor], Any]]:
    """Products with H v and G v, compiled, and H times any flat vector."""
    jax = import_module("jax")
    parameters = {name: jax.numpy.asarray(p.detach().numpy()) for name, p in problem.original.named_parameters()}
    x, y = (jax.numpy.asarray(each.numpy()) for each in (problem.x, problem.y))
    logits = lambda p: _logits(jax, problem.layers, p, x)  # noqa: E731
    loss = lambda z: -jax.numpy.take_along_axis(jax.nn.log_softmax(z), y[:, None], axis=1).mean()  # noqa: E731
    hessian = jax.jit(jax.linearize(jax.grad(lambda p: loss(logits(p))), parameters)[1])
    gauss = jax.jit(_gauss_newton(jax, logits, loss, parameters))
    v = _tree(jax, problem, problem.v)

    def flat(vector: Tensor) -> Any:
        product = hessian(_tree(jax, problem, vector))
        return jax.numpy.concatenate([product[name].ravel() for name in parameters])

    return lambda: jax.block_until_ready(hessian(v)), lambda: jax.block_until_ready(gauss(v)), flat


def _gauss_newton(jax: Any, logits: Any, loss: Any, parameters: Parameters) -> Callable[[Any], Any]:
    """Jᵀ ∇²loss J."""
    z, forward = jax.linearize(logits, parameters)
    _, backward = jax.vjp(logits, parameters)
    bend = jax.linearize(jax.grad(loss), z)[1]
    return lambda v: backward(bend(forward(v)))[0]


def _tree(jax: Any, problem: Problem, v: Tensor) -> Parameters:
    names = (name for name, _ in problem.original.named_parameters())
    pieces = problem.pieces(v.float())
    return {name: jax.numpy.asarray(piece.numpy()) for name, piece in zip(names, pieces, strict=True)}


def _logits(jax: Any, layers: int, p: Parameters, x: Any) -> Any:
    p = {name.removeprefix("model."): value for name, value in p.items()}
    h = p["embed.weight"][x] + p["position.weight"][: x.shape[1]]
    for index in range(layers):
        prefix = f"layers.{index}."
        h = _block(jax, {name.removeprefix(prefix): w for name, w in p.items() if name.startswith(prefix)}, h)
    z = _norm(jax, p, "norm", h) @ p["unembed.weight"].T
    return z.reshape(-1, z.shape[-1])


def _block(jax: Any, p: Parameters, h: Any) -> Any:
    h = h + _attention(jax, p, _norm(jax, p, "norm1", h))
    hidden = jax.nn.gelu(_norm(jax, p, "norm2", h) @ p["mlp.up.weight"].T, approximate=False)
    return h + hidden @ p["mlp.down.weight"].T


def _attention(jax: Any, p: Parameters, h: Any) -> Any:
    """softmax(q kᵀ/√d_K) v per head; q, k, v are (B, H, L, d_K)."""
    numpy, (B, L, d) = jax.numpy, h.shape
    q, k, v = (
        (h @ p[f"attn.{name}.weight"].T).reshape(B, L, HEADS, d // HEADS).transpose(0, 2, 1, 3) for name in "qkv"
    )
    scores = q @ k.transpose(0, 1, 3, 2) / (d // HEADS) ** 0.5
    A = jax.nn.softmax(numpy.where(numpy.tril(numpy.ones((L, L), bool)), scores, -numpy.inf))
    return (A @ v).transpose(0, 2, 1, 3).reshape(B, L, d) @ p["attn.o.weight"].T


def _norm(jax: Any, p: Parameters, name: str, h: Any) -> Any:
    c = h - h.mean(-1, keepdims=True)
    return c * jax.lax.rsqrt((c**2).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]
