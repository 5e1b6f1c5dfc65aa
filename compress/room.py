"""Whether disk and memory are enough for a run, before any work."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import psutil

from calibration.writing import WINDOWS_AT_ONCE
from compress.activations import IN_MEMORY_BYTES
from compress.errors import InputError
from compress.models.checkpoint import UNMAP_BYTES
from compress.models.decoder import TOKENS_PER_FORWARD
from compress.prepare import FLOAT_BYTES, PARITY_WINDOWS, Prepared
from compress.recipe import Evaluate
from compress.scheme import SUPER_BLOCK, QuantScheme
from compress.units import size

SOLVE_COPIES = 3
"""Float64 matrices of a layer's columns that a solve takes at a time: what is factorised, its factor, parts of it."""


def check_room(prepared: Prepared, plan: Mapping[str, QuantScheme], folder: Path) -> dict[str, int]:
    """Disk and memory that the run will need, in bytes; InputError if there is clearly not enough of one."""
    writing = writing_bytes(prepared) if prepared.writes_text else 0
    needed = {"disk_bytes": _disk_bytes(prepared, plan), "memory_bytes": max(_memory_bytes(prepared), writing)}
    parent = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    free_disk, free_memory = shutil.disk_usage(parent).free, psutil.virtual_memory().available
    problems = []
    if needed["disk_bytes"] > free_disk:
        problems.append(f"disk: about {size(needed['disk_bytes'])} needed, {size(free_disk)} free at {parent}")
    if needed["memory_bytes"] > free_memory:
        whole = " (source: self needs the whole model in memory)" if needed["memory_bytes"] == writing else ""
        problems.append(f"memory: about {size(needed['memory_bytes'])} needed, {size(free_memory)} available{whole}")
    if problems:
        raise InputError(
            "not enough room for this run\n" + "\n".join(problems),
            fix="write elsewhere with --out, or ask for fewer or shorter calibration samples and evaluation windows",
        )
    return needed


def writing_bytes(prepared: Prepared) -> int:
    """What a model takes that writes its own calibration text: all weights, the key/value cache, logits."""
    calibration, spec = prepared.recipe.calibration, prepared.spec
    weights = sum(math.prod(prepared.original.shape(name)) for name in prepared.original.files)
    windows = min(calibration.samples, WINDOWS_AT_ONCE)
    cached = 2 * spec.layers * spec.kv_heads * spec.head_dim * calibration.sequence_length
    # A block's tensors are there twice while it is loaded: small beside the whole.
    return FLOAT_BYTES * (weights + windows * (cached + 4 * spec.vocab_size))


def _disk_bytes(prepared: Prepared, plan: Mapping[str, QuantScheme]) -> int:
    """What the work directory and the artifacts take, at most: a planner may still raise every layer to 8 bits."""
    recipe, spec = prepared.recipe, prepared.spec
    work = artifact = spec.max_positions * spec.head_dim * FLOAT_BYTES
    for layer, (rows, columns) in prepared.shapes.items():
        scheme = plan.get(layer)
        if scheme is None:
            artifact += rows * columns * FLOAT_BYTES
        else:
            # Codes take a byte each; a group has a scale (float32, in files fp16) and perhaps a zero point or a
            # minimum, and a super-block two numbers more.
            shared = 2 * FLOAT_BYTES * (columns // SUPER_BLOCK) if scheme.two_level else 0
            work += rows * (columns + (8 if scheme.has_minima else 5) * scheme.groups(columns) + shared)
            artifact += rows * (columns + 3 * scheme.groups(columns))
            beside = prepared.residual_rank * (rows + columns)
            work += FLOAT_BYTES * beside
            artifact += FLOAT_BYTES * beside
    windows = PARITY_WINDOWS + (recipe.evaluate.windows if recipe.evaluate else 0)
    hidden = _hidden_bytes(prepared)
    spooled = hidden if hidden > IN_MEMORY_BYTES else 0
    return work + len(recipe.export) * artifact + windows * _logits_bytes(prepared) + spooled


def _logits_bytes(prepared: Prepared) -> int:
    """Of one evaluation window."""
    return _evaluated_tokens(prepared) * prepared.spec.vocab_size * FLOAT_BYTES


def _evaluated_tokens(prepared: Prepared) -> int:
    """In one window."""
    section = prepared.recipe.evaluate or Evaluate()
    return min(section.sequence_length, prepared.spec.max_positions)


def _hidden_bytes(prepared: Prepared) -> int:
    """The hidden states that are kept at a time: of one block in the walk, of all for a pass over the whole model."""
    recipe, spec = prepared.recipe, prepared.spec
    calibration = recipe.calibration
    evaluated = (recipe.evaluate.windows if recipe.evaluate else PARITY_WINDOWS) * _evaluated_tokens(prepared)
    tokens = [evaluated]
    if prepared.needs_tokens:
        streams = 2 if any("activations" in step.value.reads for step in prepared.passes) else 1
        tokens.append(streams * calibration.samples * calibration.sequence_length)
        for step in prepared.of_scope("model"):
            kept = step.value.kept_windows(calibration.samples) * calibration.sequence_length
            tokens.append((spec.layers + 1) * kept)
    return max(tokens) * spec.hidden_size * FLOAT_BYTES


def _memory_bytes(prepared: Prepared) -> int:
    """The most that one of these takes, with the hidden states that are kept in memory and one forward's own.

    A block with its statistics and the solve of its widest layer; a block with its gradients for a pass over the
    whole model; the embedding or the head.
    """
    spec = prepared.spec
    blocks = [[prepared.shapes[layer] for layer in spec.block_linears(index)] for index in range(spec.layers)]
    block = max(sum(rows * columns for rows, columns in shapes) for shapes in blocks)
    largest = max(rows * columns for shapes in blocks for rows, columns in shapes)
    widest = max(columns for shapes in blocks for _, columns in shapes)
    end = max(rows * columns for rows, columns in (prepared.shapes[layer] for layer in spec.ends))
    # Weights and codes of the block; one layer's plain rounding, its errors and their products.
    parts = [FLOAT_BYTES * 3 * end, FLOAT_BYTES * (block + 4 * largest) + block]
    if prepared.needs_tokens:
        statistics = max(_statistics_bytes(prepared, index) for index in range(spec.layers))
        parts[-1] += statistics + SOLVE_COPIES * 2 * FLOAT_BYTES * widest**2
        if any("activations" in step.value.reads for step in prepared.passes):
            # What is learned of each weight, its value and its gradient now.
            parts[-1] += 5 * FLOAT_BYTES * block
        if prepared.of_scope("model"):
            parts.append(FLOAT_BYTES * (2 * block + 3 * largest))
    middle = max(rows for shapes in blocks for rows, _ in shapes)
    forward = FLOAT_BYTES * max(TOKENS_PER_FORWARD, _evaluated_tokens(prepared)) * (3 * middle + 6 * spec.hidden_size)
    held = min(_hidden_bytes(prepared), IN_MEMORY_BYTES)
    return max(parts) + forward + held + UNMAP_BYTES + 2 * _logits_bytes(prepared)


def _statistics_bytes(prepared: Prepared, index: int) -> int:
    """The Gram matrices of everything that block ``index`` multiplies."""
    spec = prepared.spec
    firsts = [layers[0] for layers in spec.shared_inputs(index)]
    firsts += [expert[role] for expert in spec.expert_linears(index) for role in ("gate", "down")]
    return FLOAT_BYTES * sum(prepared.shapes[layer][1] ** 2 for layer in firsts)
