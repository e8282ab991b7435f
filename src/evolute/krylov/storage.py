"""Results on disk: JSON for what can be read, safetensors for arrays; never pickle, never half a file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from evolute.errors import CheckpointError

Kind = TypeVar("Kind")
KINDS: dict[str, type[Any]] = {}  # name → class of what can be saved


def saveable(kind: type[Kind]) -> type[Kind]:
    """Classes are found again by their names."""
    KINDS[kind.__name__] = kind
    return kind


def pack(value: Any, tensors: dict[str, Tensor], at: str) -> Any:
    """A tree of JSON; tensors go into `tensors`, under the path that leads to them."""
    if isinstance(value, Tensor):
        tensors[at] = value.detach().cpu().contiguous()
        return {"tensor": at}
    if dataclasses.is_dataclass(value):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return {"kind": type(value).__name__} | _packed(fields, tensors, at)
    if isinstance(value, Mapping):
        return {"mapping": _packed(cast("Mapping[str, Any]", value), tensors, at)}
    if isinstance(value, (tuple, list)):
        return [pack(each, tensors, f"{at}.{i}") for i, each in enumerate(cast("tuple[Any, ...]", value))]
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}  # JSON has no infinity
    return value


def _packed(fields: Mapping[str, Any], tensors: dict[str, Tensor], at: str) -> dict[str, Any]:
    return {str(name): pack(each, tensors, f"{at}.{name}" if at else str(name)) for name, each in fields.items()}


def unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What was packed; lists come back as tuples."""
    if isinstance(tree, list):
        return tuple(unpack(each, tensors) for each in cast("list[Any]", tree))
    if not isinstance(tree, dict):
        return tree
    fields = cast("dict[str, Any]", tree)
    if "tensor" in fields:
        return tensors[fields["tensor"]]
    if "number" in fields:
        return float(fields["number"])
    if "mapping" in fields:
        return {name: unpack(each, tensors) for name, each in fields["mapping"].items()}
    return KINDS[fields["kind"]](**{name: unpack(each, tensors) for name, each in fields.items() if name != "kind"})


def save_result(result: object, path: str | Path) -> Path:
    """`path`.json, and the arrays in `path`.safetensors beside it; the JSON last, so that it never lacks its arrays."""
    tensors = dict[str, Tensor]()
    tree = pack(result, tensors, "")
    path, arrays = _names(path)
    content = save(tensors) if tensors else b""
    described = {"evolute": 1, "arrays": _digest(content), "result": tree}
    text = json.dumps(described, indent=1, ensure_ascii=False, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if tensors:
            write(arrays, content)
        write(path, text.encode())
    except OSError as error:
        raise CheckpointError(f"cannot write '{path}': {error.strerror or error}.") from error
    return path


def load_result(path: str | Path, wanted: type[Any]) -> Any:
    """What was saved, if it is what was wanted."""
    path, arrays = _names(path)
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        content = arrays.read_bytes() if described["arrays"] != _digest(b"") else b""
        if described["arrays"] != _digest(content):
            raise CheckpointError(f"'{arrays}' is not the file that was saved with '{path}'; save the result again.")
        result = unpack(described["result"], load_file(arrays) if content else {})
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"'{path}' is no saved result of evolute: {error}.") from error
    if not isinstance(result, wanted):
        raise CheckpointError(f"'{path}' holds a {type(result).__name__}, expected a {wanted.__name__}.")
    return result


def _names(path: str | Path) -> tuple[Path, Path]:
    path = Path(path)
    path = path if path.suffix == ".json" else path.with_name(path.name + ".json")
    return path, path.with_suffix(".safetensors")


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def write(path: Path, content: bytes) -> None:
    """All of it or nothing: a new file takes the place of the old one in one step."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
