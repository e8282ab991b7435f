"""`evolute info`: what is installed, and what is not."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from typing import Any

import psutil
import torch
from rich.table import Table

from evolute import __version__
from evolute.cli.json_output import JsonFile, check_writable, emit
from evolute.cli.peers import PEERS
from evolute.cli.printing import console, plain

GB = 10**9


def info(json_file: JsonFile = None) -> None:
    """Show versions, devices, memory, and which optional parts are installed, with the line that installs the others.

    Put it into a bug report.

    [bold]evolute info[/bold]

    [bold]evolute info --json[/bold]
    """
    check_writable(json_file)
    document = facts()
    if emit(document, json_file):
        console().print(_table(document))


def facts() -> dict[str, Any]:
    """Everything that is shown."""
    memory = psutil.virtual_memory()
    return {
        "evolute": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": _devices(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "memory": {"total": memory.total, "available": memory.available},
        "extras": {name: _extra(name) for name in metadata.metadata("evolute").get_all("Provides-Extra") or []},
        "peers": {each.module: {"version": each.version, "install": each.install} for each in PEERS},
    }


def _devices() -> list[dict[str, Any]]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(index) for index in range(count)]
    return [{"name": each.name, "memory": each.total_memory} for each in found]


def _extra(name: str) -> dict[str, Any]:
    """The packages that an extra brings, and those of them that are missing."""
    ending = re.compile(rf"extra\s*==\s*['\"]{re.escape(name)}['\"]")
    lines = [line for line in metadata.requires("evolute") or [] if ending.search(line)]
    packages = {re.split(r"[^\w.-]", line, maxsplit=1)[0]: None for line in lines}
    versions = {package: _version(package) for package in packages}
    missing = [package for package, version in versions.items() if version is None]
    return {"packages": versions, "missing": missing, "install": _install(name)}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _install(extra: str) -> str:
    """From the folder of the clone, where evolute was installed from one."""
    origin = metadata.distribution("evolute").read_text("direct_url.json") or ""
    editable = re.search(r'"editable":\s*true', origin)
    return f"pip install -e '.[{extra}]'" if editable else f"pip install 'evolute[{extra}]'"


# ---------------------------------------------------------------- what is printed


def _table(found: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False)
    for name in ("evolute", "python", "torch", "platform"):
        table.add_row(name, found[name])
    devices = [f"{each['name']}, {each['memory'] / GB:.0f} GB" for each in found["devices"]]
    table.add_row("CUDA", f"{found['cuda']}: {'; '.join(devices)}" if devices else "no device")
    table.add_row("threads", f"{found['threads']} of {found['cores']} cores")
    free, total = (found["memory"][key] / GB for key in ("available", "total"))
    table.add_row("memory", f"{free:.1f} GB free of {total:.1f} GB")
    for name, extra in found["extras"].items():
        table.add_row(plain(f"extra [{name}]"), plain(_state(extra["missing"], extra["install"])))
    for name, peer in found["peers"].items():
        table.add_row(f"peer {name}", peer["version"] or f"not installed: {peer['install']}")
    return table


def _state(missing: list[str], install: str) -> str:
    return "installed" if not missing else f"without {', '.join(missing)}: {install}"
