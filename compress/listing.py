"""What ``compress list`` shows: rows of plain values."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, Literal

from compress import registry
from compress.fields import plain, required_fields
from compress.recipe import bundled

Row = dict[str, Any]
RUNTIME_LIBRARIES = ("onnxruntime", "llama-cpp-python")


def passes() -> list[Row]:
    """Every pass: name, what it does, arguments with their defaults, and which of them have none."""
    return _classes("passes")


def exporters() -> list[Row]:
    """Every exporter: name, what it writes, arguments with their defaults, and which of them have none."""
    return _classes("exporters")


def recipes() -> list[Row]:
    """Every bundled recipe: name, its first comment, file."""
    rows = []
    for path in bundled():
        first, _, _ = path.read_text(encoding="utf-8").partition("\n")
        rows.append({"name": path.stem, "what": first.removeprefix("#").strip(), "path": str(path)})
    return rows


def devices() -> list[Row]:
    """What artifacts would run on here: this machine's CPU, with memory in bytes and the runtimes' versions."""
    from compress.runner.bandwidth import last_level_cache_bytes
    from compress.runner.measure import cpu_model
    from compress.runner.memory import available_bytes
    from compress.runner.threads import available_cpus

    return [
        {
            "name": "cpu",
            "model": cpu_model(),
            "cpus": os.cpu_count(),
            "available_cpus": available_cpus(),
            "available_memory_bytes": available_bytes(),
            "last_level_cache_bytes": last_level_cache_bytes(),
            "runtimes": {library: _version(library) for library in RUNTIME_LIBRARIES},
        }
    ]


TABLES: Mapping[str, Callable[[], list[Row]]] = MappingProxyType(
    {"passes": passes, "exporters": exporters, "recipes": recipes, "devices": devices}
)


def _classes(kind: Literal["passes", "exporters"]) -> list[Row]:
    return [_describe(name, registry.load(kind, name)) for name in registry.names(kind)]


def _describe(name: str, cls: type[Any]) -> Row:
    required = required_fields(cls)
    defaults = {item.name: plain(_default(item)) for item in dataclasses.fields(cls) if item.name not in required}
    first, _, _ = (cls.__doc__ or "").strip().partition("\n")
    return {"name": name, "what": first.replace("``", ""), "arguments": defaults, "required": required}


def _default(item: dataclasses.Field[Any]) -> Any:
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"
