"""A small llama written as every format, for tests that run artifacts in their real runtimes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress import registry
from compress.protocols import Artifact
from tests.support import TEMPLATE, rounded_model, tiny_llama

FORMATS = ("onnx", "gguf")


def export(
    folder: Path,
    scheme: str = "int4-g32",
    plan: Mapping[str, str | None] | None = None,
    ends: str | None = "int8-g32",
    chat_template: str | None = TEMPLATE,
    **overrides: Any,
) -> dict[str, Artifact]:
    """Checkpoint in ``folder/model``, artifacts in folders named by format; arguments as in tests.support."""
    checkpoint = tiny_llama(folder / "model", chat_template=chat_template, **overrides)
    model = rounded_model(checkpoint, folder / "work", scheme, plan, ends)
    artifacts = {}
    for format in FORMATS:
        (folder / format).mkdir()
        artifacts[format] = registry.load("exporters", format)().write(model, folder / format)
    return artifacts
