"""Where and in which precision: --device and --dtype."""

from __future__ import annotations

import torch

from evolute.cli.refusal import refuse

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def dtype(text: str) -> torch.dtype:
    """A floating-point type.

    >>> dtype("float64")
    torch.float64
    """
    if text not in DTYPES:
        refuse(f"--dtype: expected {', '.join(list(DTYPES)[:-1])} or {list(DTYPES)[-1]}, got {text!r}")
    return DTYPES[text]


def device(text: str) -> torch.device:
    """A device that is there.

    >>> device("cpu")
    device(type='cpu')
    """
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or text.endswith(":"):
        refuse(f"--device: expected cpu, cuda or cuda:1, got {text!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(index or 0) >= count:
        there = f"{count or 'no'} CUDA device{'s' * (count != 1)}"
        refuse(f"--device: PyTorch sees {there} here, so there is no {text!r}; use cpu")
    return torch.device(text)
