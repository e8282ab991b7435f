"""BlockWeights out of nn.TransformerEncoderLayer, or out of a block that names its parts as those of evolute.zoo do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evolute.calculus.activations import ACTIVATIONS
from evolute.calculus.weights import BlockWeights, Norm, Projection
from evolute.errors import CurvatureWarning, ModelError
from evolute.linop.space import Part, Space

ENGINE = "For any other model there is the matrix-free ev.Hessian(ev.Objective(model, batches, loss))."


def read(layer: nn.Module) -> BlockWeights:
    """The weights of a layer, and how it is wired."""
    if isinstance(layer, nn.TransformerEncoderLayer):
        _refuse_overrides(layer, nn.TransformerEncoderLayer, "forward", "_sa_block", "_ff_block")
        weights = _encoder_layer(layer)
    elif _is_block(layer):
        weights = _block(layer)
    else:
        raise ModelError(
            f"closed forms cover nn.TransformerEncoderLayer and the blocks of evolute.zoo; got {type(layer).__name__}. "
            f"{ENGINE}"
        )
    _refuse_strays(layer, weights)
    return weights


# ---- nn.TransformerEncoderLayer


def _encoder_layer(layer: nn.TransformerEncoderLayer) -> BlockWeights:
    attention = layer.self_attn
    _refuse_overrides(attention, nn.MultiheadAttention, "forward")
    _refuse_options(attention)
    _say_dropout(layer)
    q, k, v = _unpacked(attention)
    d = attention.embed_dim
    parts = {
        **{name: Part("self_attn.in_proj_weight", 0, i * d, (i + 1) * d) for i, name in enumerate("qkv")},
        **{f"{name}.bias": Part("self_attn.in_proj_bias", 0, i * d, (i + 1) * d) for i, name in enumerate("qkv")},
        **_pieces("o", "self_attn.out_proj"),
        **_pieces("w1", "linear1"),
        **_pieces("w2", "linear2"),
        **_pieces("norm1", "norm1", weight="norm1.weight"),
        **_pieces("norm2", "norm2", weight="norm2.weight"),
    }
    space, known = _space(layer, parts)
    return BlockWeights(
        heads=attention.num_heads,
        q=q,
        k=k,
        v=v,
        space=space,
        parts=known,
        o=_projection(attention.out_proj),
        up=_projection(layer.linear1),
        down=_projection(layer.linear2),
        norm1=_norm(layer.norm1, q),
        norm2=_norm(layer.norm2, q),
        order="pre" if layer.norm_first else "post",
        activation=_activation(layer.activation),
    )


def _refuse_overrides(module: nn.Module, known: type[nn.Module], *methods: str) -> None:
    """A subclass may compute something else with the same weights."""
    for name in methods:
        if getattr(getattr(module, name), "__func__", None) is not getattr(known, name):
            raise ModelError(
                f"closed forms cover nn.{known.__name__} as it is; {type(module).__name__} has a {name} of its own. "
                f"{ENGINE}"
            )


def _refuse_options(attention: nn.MultiheadAttention) -> None:
    options = {
        "kdim or vdim": not attention._qkv_same_embed_dim,  # pyright: ignore[reportPrivateUsage]
        "add_bias_kv": attention.bias_k is not None,
        "add_zero_attn": attention.add_zero_attn,
    }
    for name, used in options.items():
        if used:
            raise ModelError(f"closed forms do not cover the option {name} of nn.MultiheadAttention. {ENGINE}")


def _say_dropout(layer: nn.TransformerEncoderLayer) -> None:
    rates = [layer.self_attn.dropout, *(each.p for each in layer.modules() if isinstance(each, nn.Dropout))]
    if layer.training and any(rates):
        warnings.warn(
            f"the layer is in training mode with dropout {max(rates):g}; closed forms are those of layer.eval(), "
            "without dropout.",
            CurvatureWarning,
            stacklevel=5,
        )


def _unpacked(attention: nn.MultiheadAttention) -> list[Projection]:
    weight, bias = _copy(attention.in_proj_weight), _copy(attention.in_proj_bias)
    assert weight is not None
    biases = [None] * 3 if bias is None else bias.chunk(3)
    return [Projection(w, b) for w, b in zip(weight.chunk(3), biases, strict=True)]


def _activation(function: Callable[[Tensor], Tensor]) -> str:
    """By what it is, and if that does not tell, by what it does."""
    if isinstance(function, nn.GELU):
        return "gelu" if function.approximate == "none" else "gelu_tanh"
    known = {F.relu: "relu", F.gelu: "gelu", F.silu: "silu", torch.relu: "relu", torch.tanh: "tanh", F.tanh: "tanh"}
    modules = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Identity: "identity", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}
    name = known.get(function) or modules.get(type(function))  # pyright: ignore[reportArgumentType, reportCallIssue]
    return name or _recognised(function)


def _recognised(function: Callable[[Tensor], Tensor]) -> str:
    far = torch.logspace(1, 6, 6, dtype=torch.float64)  # relu6 is a relu up to 6
    x = torch.cat([-far, torch.linspace(-8, 8, 81, dtype=torch.float64), far])
    with torch.no_grad():
        y = function(x.clone())  # in place, maybe
    for name, phi in ACTIVATIONS.items():
        if y.shape == x.shape and torch.allclose(y, phi.value(x), rtol=1e-12, atol=1e-12):
            return name
    raise ModelError(f"closed forms cover the activations {', '.join(ACTIVATIONS)}; got {function!r}. {ENGINE}")


# ---- blocks of evolute.zoo


def _is_block(layer: nn.Module) -> bool:
    attention = getattr(layer, "attn", None)
    return hasattr(layer, "config") and all(hasattr(attention, name) for name in ("q", "k", "v", "o"))


def _block(layer: Any) -> BlockWeights:
    config, attention, mlp = layer.config, layer.attn, layer.mlp
    names = {"q": "attn.q", "k": "attn.k", "v": "attn.v", "o": "attn.o"}
    names |= {"w1": "mlp.up", "w2": "mlp.down", "gate": "mlp.gate", "norm1": "norm1", "norm2": "norm2"}
    parts = dict[str, Part]()
    for group, module in names.items():
        norm = group.startswith("norm")
        parts |= _pieces(group, module, weight=f"{group}.weight" if norm else group)
    space, known = _space(layer, parts)
    q, k, v = (_projection(each) for each in (attention.q, attention.k, attention.v))
    return BlockWeights(
        heads=config.heads,
        q=q,
        k=k,
        v=v,
        space=space,
        parts=known,
        o=_optional(attention.o),
        up=_optional(mlp and mlp.up),
        down=_optional(mlp and mlp.down),
        gate=_optional(mlp and mlp.gate),
        norm1=_norm(layer.norm1, q),
        norm2=_norm(layer.norm2, q),
        order=config.norm,
        residual=config.residual,
        attention=config.attention,
        activation=config.activation,
        causal=config.causal,
        sink=config.sink,
    )


# ---- both


def _pieces(group: str, module: str, weight: str | None = None) -> dict[str, Part]:
    return {weight or group: Part(f"{module}.weight"), f"{group}.bias": Part(f"{module}.bias")}


def _space(layer: nn.Module, parts: Mapping[str, Part]) -> tuple[Space, dict[str, Part]]:
    """The trainable parameters, in PyTorch's order, and the groups of which all is there."""
    trainable = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    if not trainable:
        raise ModelError("no parameter of the layer is trainable; call layer.requires_grad_(True).")
    first = next(iter(trainable.values()))
    odd = {p.dtype for p in layer.parameters()} - {first.dtype}
    if odd or not first.is_floating_point():
        raise ModelError(f"expected parameters of one floating-point dtype; got {first.dtype} and {odd or 'no other'}.")
    known = {group: part for group, part in parts.items() if part.name in trainable}
    shapes = {name: tuple(p.shape) for name, p in trainable.items()}
    return Space(shapes, {group: (part,) for group, part in known.items()}, first.dtype, first.device), known


def _refuse_strays(layer: nn.Module, weights: BlockWeights) -> None:
    """Parameters that are felt in a way that no closed form knows: foreign ones, and one under two names."""
    known = {part.name for part in weights.parts.values()}
    strays = [name for name in weights.space.names if name not in known]
    if strays:
        raise ModelError(
            f"closed forms do not know the trainable parameter {strays[0]} (an adapter, a parametrisation?); a "
            f"frozen one is a constant. {ENGINE}"
        )
    names = dict[nn.Parameter, str]()
    for name, parameter in layer.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and names.setdefault(parameter, name) != name:
            raise ModelError(
                f"{names[parameter]} and {name} are one parameter; closed forms do not cover tied weights. {ENGINE}"
            )


def _projection(linear: nn.Linear) -> Projection:
    if not isinstance(linear, nn.Linear):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"expected nn.Linear, got {type(linear).__name__} (an adapter, a quantised layer?). {ENGINE}")
    _refuse_overrides(linear, nn.Linear, "forward")
    weight = _copy(linear.weight)
    assert weight is not None
    return Projection(weight, _copy(linear.bias))


def _optional(linear: nn.Linear | None) -> Projection | None:
    return None if linear is None else _projection(linear)


def _norm(module: nn.Module | None, q: Projection) -> Norm | None:
    if module is None:
        return None
    if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        raise ModelError(f"closed forms cover nn.LayerNorm and nn.RMSNorm; got {type(module).__name__}. {ENGINE}")
    _refuse_overrides(module, nn.LayerNorm if isinstance(module, nn.LayerNorm) else nn.RMSNorm, "forward")
    if tuple(module.normalized_shape) != q.weight.shape[1:]:
        raise ModelError(
            f"closed forms cover norms over the {q.weight.shape[1]} features of a token; got one over "
            f"{tuple(module.normalized_shape)}. {ENGINE}"
        )
    eps = torch.finfo(q.weight.dtype).eps if module.eps is None else module.eps
    return Norm(_copy(module.weight), _copy(getattr(module, "bias", None)), eps, isinstance(module, nn.LayerNorm))


def _copy(parameter: Tensor | None) -> Tensor | None:
    """As it is now: an operator belongs to one point, and training may go on."""
    return None if parameter is None else parameter.detach().clone()
