"""What a group of parameters is: in which layer, and of which kind (Q, K, V, O, W₁, W₂, norms, embeddings)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from evolute.linop.space import Group

LAYER = re.compile(r"(?:(?P<stack>.+)\.)?(?:layers?|h|blocks?)\.(?P<index>\d+(?:\.\d+)*)(?:\.(?P<rest>.+))?")
KINDS = {
    "Q": r"(attn|cross)\.q",
    "K": r"(attn|cross)\.k",
    "V": r"(attn|cross)\.v",
    "O": r"(attn|cross)\.o",
    "QKV": r"(attn|cross)\.qkv",
    "W₁": r"mlp\.(up|gate|gate_up)",
    "W₂": r"mlp\.down",
    "Norms": r"(.*\.)?(q_|k_)?norm\d*",
    "Embeddings": r"(.*\.)?embed(\..+)?",
    "Unembedding": r"(.*\.)?(unembed|head(\..+)?|pooler.*)",
}
EMBEDDING, HEAD = "Embedding", "Head"
MOST = 40  # groups that a heatmap can name


def kind_of(group: str) -> str:
    """What it does.

    >>> kind_of("layers.0.attn.q"), kind_of("layers.11.mlp.up"), kind_of("norm"), kind_of("embed.position")
    ('Q', 'W₁', 'Norms', 'Embeddings')
    """
    found = LAYER.fullmatch(group)
    rest = (found["rest"] or "") if found else group
    return next((kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, rest)), rest or "Weights")


def layer_of(group: str) -> str:
    """Where it is.

    >>> layer_of("layers.0.attn.q"), layer_of("encoder.layers.3.norm1"), layer_of("embed"), layer_of("unembed")
    ('Layer 0', 'encoder layer 3', 'Embedding', 'Head')
    """
    found = LAYER.fullmatch(group)
    if found:
        return f"{found['stack']} layer {found['index']}" if found["stack"] else f"Layer {found['index']}"
    if kind_of(group) == "Embeddings":
        return EMBEDDING
    return HEAD if kind_of(group) in ("Norms", "Unembedding") else group


def label(group: str) -> str:
    """What a heatmap can hold.

    >>> label("layers.0.attn.q"), label("layers.1.norm2"), label("embed.position"), label("unembed")
    ('0 Q', '1 norm2', 'position', 'unembed')
    """
    found = LAYER.fullmatch(group)
    if not found:
        return group.removeprefix("embed.")
    rest, kind = found["rest"] or "", kind_of(group)
    name = rest if kind in ("Norms", rest) else kind
    return f"{found['stack'] + ' ' if found['stack'] else ''}{found['index']} {name}".strip()


def prefix_of(group: str) -> str | None:
    """'layers.0', by which a whole layer can be selected; None outside of layers."""
    found = LAYER.fullmatch(group)
    return group[: found.end("index")] if found else None


def coarse_name(group: str, level: int) -> str:
    """The group itself (0), its sublayer (1) or its layer (2).

    >>> [coarse_name("layers.0.attn.q", level) for level in range(3)]
    ['layers.0.attn.q', 'layers.0.attn', 'layers.0']
    """
    found = LAYER.fullmatch(group)
    if not found or level == 0:
        return group
    sublayer = re.sub(r"[.0-9].*", "", found["rest"] or "") if level == 1 else ""
    return f"{group[: found.end('index')]}.{sublayer}".rstrip(".")


def coarser(groups: Mapping[str, Group], most: int) -> dict[str, Group]:
    """The groups themselves, or sublayers (attention, feed-forward, norms), or whole layers: what is few enough."""
    merged = [_merged(groups, level) for level in range(3)]
    return next((each for each in merged if len(each) <= most), merged[-1])


def _merged(groups: Mapping[str, Group], level: int) -> dict[str, Group]:
    merged = dict[str, Group]()
    for group, parts in groups.items():
        name = coarse_name(group, level)
        merged[name] = (*merged.get(name, ()), *parts)
    return merged


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Each once, in the order of their first appearance."""
    return tuple(dict.fromkeys(names))
