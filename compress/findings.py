"""What the report says beside the measurements: model, machine, gates, warnings."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from compress import __version__
from compress.prepare import Prepared
from compress.recipe import Recipe
from compress.report import ArtifactRecord, GateRecord, LayerRecord, PassRecord
from compress.runner.measure import cpu_model
from compress.scheme import QuantScheme

ACTIVATION_KLD = 8e-3
"""KLD (nats) that 8-bit activations may cost before the report warns."""

SHOWN = 12
"""Layers that a warning names."""
# None at all is another matter than few.
_NUMBER = re.compile(r"\b(?!0\b(?!\.))\d+(\.\d+)?(e[+-]?\d+)?")

GATES: dict[str, tuple[str, int]] = {
    "max_kld": ("quality.kld_mean", 1),
    "min_top1": ("quality.top1_agreement", -1),
    "max_size": ("bytes", 1),
    "max_bits_per_weight": ("bits_per_weight", 1),
    "min_decode_tps": ("performance.decode_tps.value", -1),
    "max_peak_rss": ("performance.peak_rss_bytes.value", 1),
}
"""Gate -> (the number in an artifact's record, 1 for an upper limit or -1 for a lower one)."""


def check_gates(recipe: Recipe, artifacts: Sequence[ArtifactRecord]) -> Iterator[GateRecord]:
    """Every gate of the recipe against every artifact."""
    for gate, (where, sign) in GATES.items():
        limit = getattr(recipe.gates, gate)
        if limit is None:
            continue
        for artifact in artifacts:
            value: Any = artifact
            for name in where.split("."):
                value = getattr(value, name)
            yield GateRecord(gate, artifact.format, float(limit), float(value), sign * value <= sign * limit)


def pass_warnings(passes: Sequence[PassRecord]) -> Iterator[str]:
    """One line for each kind of fallback that a pass had to take; reasons that differ in numbers alone are one kind."""
    for record in passes:
        kinds: dict[str, list[LayerRecord]] = {}
        for layer in record.layers:
            if layer.fallback is not None:
                kinds.setdefault(_NUMBER.sub("#", layer.fallback), []).append(layer)
        for found in kinds.values():
            reasons: dict[str | None, list[str]] = {}
            for layer in found[:SHOWN]:
                reasons.setdefault(layer.fallback, []).append(layer.layer)
            rest = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            said = "; ".join(f"{reason} ({', '.join(names)})" for reason, names in reasons.items())
            yield f"{record.name}: {said}{rest}"


def activation_warnings(artifacts: Sequence[ArtifactRecord]) -> Iterator[str]:
    """A line for each artifact that rounding activations to 8 bits hurts more than it should."""
    for artifact in artifacts:
        if artifact.parity is not None and artifact.parity.kld_as_run > ACTIVATION_KLD:
            cost = f"{artifact.parity.kld_as_run:.3g} nats (usual: below {ACTIVATION_KLD:g})"
            yield f"{artifact.format}: the runtime's 8-bit activations cost {cost}; smaller groups cost less"


def describe_model(prepared: Prepared, schemes: Mapping[str, QuantScheme]) -> dict[str, Any]:
    """The model, for the report, and how much of it ``schemes`` quantise."""
    checkpoint, spec = prepared.checkpoint, prepared.spec
    weights = {layer: rows * columns for layer, (rows, columns) in prepared.shapes.items()}
    linears = sum(weights[layer] for layer in spec.all_linears())
    # Routers and the like are matrices that nothing quantises: they count, and are named.
    weights |= {layer: math.prod(checkpoint.shape(f"{layer}.weight")) for layer in spec.float_linears()}
    quantised = sum(weights[layer] for layer in schemes)
    tied_copy = f"{spec.family.head}.weight" if spec.tied else None
    return {
        "source": prepared.recipe.model,
        "name": checkpoint.name,
        "family": spec.family.name,
        "blocks": spec.layers,
        "weights": sum(weights.values()),
        "linear_weights": linears,
        "quantized_weights": quantised,
        "quantized_share": quantised / sum(weights.values()),
        "parameters": sum(math.prod(checkpoint.shape(name)) for name in checkpoint.files if name != tied_copy),
        "float_layers": [layer for layer in weights if layer not in schemes],
        "tied_head": spec.tied,
        "bytes": checkpoint.bytes,
    }


LIBRARIES = ("torch", "transformers", "onnx", "onnxruntime", "gguf", "llama-cpp-python", "numpy", "datasets", "optimum")
"""Whose versions the report names, as far as they are installed."""


def environment(threads: int) -> dict[str, Any]:
    """What the run ran on: without it no number means much."""
    return {
        "edgepress": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "threads": threads,
        "torch_threads": torch.get_num_threads(),
        **dict(_versions()),
    }


def _versions() -> Iterator[tuple[str, str]]:
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):
            yield library, version(library)
