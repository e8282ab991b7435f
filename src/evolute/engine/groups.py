"""Names for the pieces of any Transformer: 'layers.0.attn.q', whatever the model calls it and however it is packed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from evolute.engine import groups_rules as rules
from evolute.engine.groups_places import Place, Site, join, places
from evolute.errors import ModelError
from evolute.linop.space import Group, Part


def groups(model: nn.Module) -> dict[str, Group]:
    """Every parameter of the model in exactly one group: a partition, in the order of `named_parameters()`.

    'embed', 'layers.0.attn.q' (k, v, o), 'layers.0.mlp.up' (gate, down), 'layers.0.norm1', 'norm', 'unembed', 'head';
    'cross' beside 'attn' in decoders; 'encoder.…' and 'decoder.…', or the names of the towers, where there are several
    stacks of layers. A bias is with its weight, tied weights count once, adapters are 'layers.0.attn.q.lora_a'. A
    packed weight is sliced where q, k and v are contiguous, and 'attn.qkv' where they are not. What has no such name,
    and every model without attention, goes by its modules.

    >>> list(groups(nn.TransformerEncoderLayer(8, 2, 16)))
    ['attn.q', 'attn.k', 'attn.v', 'attn.o', 'mlp.up', 'mlp.down', 'norm1', 'norm2']
    >>> groups(nn.MultiheadAttention(8, 2))["attn.k"][0].label
    'in_proj_weight[8:16]'
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}.")
    claims = [claim for place in places(model) for claim in _claims(place)]
    return _gather(list(_numbered(claims)))


# ---------------------------------------------------------------- what a parameter is


def _role(place: Place) -> str | None:
    """'attn.q', 'mlp.up', 'norm#', 'embed.position', …; None where no table knows it."""
    norm = rules.NORM_CLASS.search(type(place.site.owners[-1]).__name__) is not None
    if place.in_layer:
        return _norm_in_layer(place) if norm else _in_layer(place)
    if place.site.attends and not norm:
        return _attention(place)
    if not place.transformer:
        return None
    return _match(rules.NORM_ROLES if norm else rules.OUTER_ROLES, place.site.tail)


def _match(table: rules.Rules, tail: str) -> str | None:
    return next((role for role, pattern in table.items() if pattern.fullmatch(tail)), None)


def _norm_in_layer(place: Place) -> str:
    role = _match(rules.ATTENTION_ROLES, place.site.tail)
    return f"{_attention_name(place)}.{role}" if role in ("q_norm", "k_norm") else "norm#"


def _in_layer(place: Place) -> str | None:
    site = place.site
    if site.attends:
        return _attention(place) or f"{_attention_name(place)}.{site.words[-1]}"
    role = _match(rules.FEED_FORWARD_ROLES, site.tail)
    if role:
        return f"mlp.{role}"
    if rules.ROUTER_CLASS.search(type(site.owners[-1]).__name__):
        return "mlp.router"
    return "mlp#" if rules.SEQUENTIAL.fullmatch(site.tail) else None


def _attention(place: Place) -> str | None:
    role = _match(rules.ATTENTION_ROLES, place.site.tail)
    return role and f"{_attention_name(place)}.{role}"


def _attention_name(place: Place) -> str:
    """'cross' for attention to another sequence, if the name of its module says so."""
    decoder = any(hasattr(owner, "self_attn") and hasattr(owner, "multihead_attn") for owner in place.site.owners)
    named = any(rules.CROSS.search(name.lower()) for name in place.rest)
    return "cross" if named or (decoder and "multihead_attn" in place.rest) else "attn"


# ---------------------------------------------------------------- which group it is in


@dataclass(frozen=True)
class _Claim:
    """A part wants to be in the group `name`; if another module wants that name too, each goes by its path."""

    name: str
    path: str
    owner: str
    part: Part


def _claims(place: Place) -> Iterator[_Claim]:
    site, role = place.site, _role(place)
    prefix = place.prefix if place.in_layer or not site.attends else _around_attention(site)
    path = join(place.prefix if place.in_layer else "", *place.rest) + site.adapter
    if role is None:
        path = join(path, site.leaf) if not place.rest and (site.direct or not path) else path
        yield _Claim(path, path, site.owner, Part(site.name))
        return
    for piece, part in _pieces(site, role):
        suffix = "" if piece == role else piece.rpartition(".")[2]
        yield _Claim(join(prefix, piece) + site.adapter, join(path, suffix) or site.leaf, site.owner, part)


def _around_attention(site: Site) -> str:
    """The path of the module around an attention that is in no layer: 'pooler' of 'pooler.attention.q_proj'."""
    named = [depth for depth, name in enumerate(site.path) if rules.ATTENTION.search(name.lower())]
    depth = named[0] if named else site.multihead or 0
    return join(*site.path[:depth])


def _pieces(site: Site, role: str) -> list[tuple[str, Part]]:
    """A packed weight cut along its outputs, or the whole."""
    attention, _, packed = role.rpartition(".")
    names = _packing(site, packed)
    if not names:
        return [(role, Part(site.name))]
    dim = 1 if _is_conv1d(site) and site.leaf == "weight" else 0
    size = site.shape[dim] // len(names)
    return [(join(attention, name), Part(site.name, dim, i * size, (i + 1) * size)) for i, name in enumerate(names)]


def _packing(site: Site, packed: str) -> tuple[str, ...]:
    """What is packed into a weight, in order; nothing where it is not known to be one after the other."""
    names = rules.PACKED.get(packed, ())
    if not names or site.adapter:
        return ()
    if site.multihead is not None:
        return names
    weight = getattr(site.owners[-1], "weight", None)
    interleaved = any(rules.INTERLEAVED_CLASS.search(type(owner).__name__) for owner in site.owners)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or interleaved or rules.INTERLEAVED.fullmatch(site.tail):
        return ()
    inputs, outputs = weight.shape if _is_conv1d(site) else reversed(weight.shape)
    if packed == "gate_up":
        return names
    known = {3: names, 2: ("k", "v") if _is_conv1d(site) else ()}  # GPT-2's cross attention has q apart
    return known.get(outputs // inputs, ()) if outputs % inputs == 0 else ()


def _is_conv1d(site: Site) -> bool:
    return type(site.owners[-1]).__name__ == "Conv1D"  # (inputs, outputs), of transformers


# ---------------------------------------------------------------- every name to one module


def _gather(claims: list[_Claim]) -> dict[str, Group]:
    owners = dict[str, set[str]]()
    for claim in claims:
        owners.setdefault(claim.name, set()).add(claim.owner)
    gathered = dict[str, list[Part]]()
    for claim in claims:
        gathered.setdefault(claim.name if _related(owners[claim.name]) else claim.path, []).append(claim.part)
    return {name: tuple(parts) for name, parts in gathered.items()}


def _related(owners: set[str]) -> bool:
    """One module, or one and its descendants (an unembedding and the bias that its head keeps)."""
    top = min(owners, key=len)
    return all(owner == top or owner.startswith(top + ".") for owner in owners)


def _numbered(claims: list[_Claim]) -> Iterator[_Claim]:
    """'norm#' is the 1st, 2nd, … norm of its layer; 'mlp#', of an nn.Sequential, is up or down if there are two."""
    modules = dict[str, list[str]]()
    for claim in claims:
        if "#" in claim.name and claim.path not in modules.setdefault(claim.name, []):
            modules[claim.name].append(claim.path)
    for claim in claims:
        found = sorted(modules.get(claim.name, []), key=lambda path: bool(rules.LAST_NORM.search(path)))
        place = found.index(claim.path) if found else 0
        if "norm#" in claim.name:
            yield replace(claim, name=claim.name.replace("#", str(place + 1)))
        elif found:
            yield replace(
                claim, name=claim.name.replace("#", (".up", ".down")[place]) if len(found) == 2 else claim.path
            )
        else:
            yield claim
