"""Names to classes: a literal table of what is built in, and entry points for what others bring.

Entry point groups: ``edgepress.passes``, ``edgepress.exporters``. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, Literal

from compress.errors import InputError, nearest

Kind = Literal["passes", "exporters", "runtimes"]

BUILTIN: Mapping[Kind, Mapping[str, str]] = MappingProxyType(
    {
        "passes": {
            "rtn": "compress.passes.rtn:Rtn",
            "gptq": "compress.passes.gptq:Gptq",
            "mixed": "compress.passes.mixed:Mixed",
            "awq": "compress.passes.awq:Awq",
            "rotate": "compress.passes.rotate:Rotate",
            "guided": "compress.passes.guided:Guided",
            "autoround": "compress.passes.autoround:Autoround",
            "kv": "compress.passes.kv:Kv",
            "lowrank": "compress.passes.lowrank:Lowrank",
            "activations": "compress.passes.activations:Activations",
        },
        "exporters": {
            "onnx": "exporters.onnx:OnnxExporter",
            "gguf": "exporters.gguf:GgufExporter",
        },
        "runtimes": {
            "onnx": "compress.runner.ort:OrtRuntime",
            "gguf": "compress.runner.llamacpp:LlamaCppRuntime",
        },
    }
)


def names(kind: Kind) -> list[str]:
    """Every known name of a kind: built in first, then third parties'."""
    return list(_table(kind))


def load(kind: Kind, name: str) -> type[Any]:
    """Import the class behind a name; InputError lists the known names when there is none."""
    table = _table(kind)
    if name not in table:
        raise InputError(f"no {kind} named '{name}'{nearest(name, table)}", fix=f"known: {', '.join(table)}")
    module, _, attribute = table[name].partition(":")
    found: type[Any] = getattr(importlib.import_module(module), attribute)
    return found


def _table(kind: Kind) -> Mapping[str, str]:
    third_party = {point.name: point.value for point in entry_points(group=f"edgepress.{kind}")}
    clash = third_party.keys() & BUILTIN[kind].keys()
    if clash:
        raise InputError(f"entry points in edgepress.{kind} reuse built-in names: {', '.join(sorted(clash))}")
    return {**BUILTIN[kind], **third_party}
