"""Rotary positions of a GGUF file as ``rope_parameters`` of transformers: keys, and tensors of factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from compress.errors import InputError
from compress.models.gguf.facts import Facts, decimal

LLAMA3_LENGTHS = (8192, *(1 << power for power in range(8, 21) if power != 13))
"""Original lengths that are tried for Llama-3's scaling; those of Meta's models first."""
LLAMA3_FREQUENCIES = (1.0, 4.0)
"""``low_freq_factor`` and ``high_freq_factor`` of every model with that scaling."""
ROPE_FACTORS = {kind: f"rope_factors_{kind}.weight" for kind in ("long", "short")}
ROPE_FREQUENCIES = "rope_freqs.weight"
KNOWN_ASIDE = frozenset({ROPE_FREQUENCIES, *ROPE_FACTORS.values()})
"""Tensors that are part of the configuration in a checkpoint."""


def rope(facts: Facts) -> dict[str, Any]:
    """``rope_parameters``: base, scaling, and the share of a head that is rotated."""
    heads = max(1, facts.need("attention.head_count"))
    head_dim = facts.get("attention.key_length", facts.need("embedding_length") // heads)
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": facts.get("rope.freq_base", 10000.0)}
    rotated = facts.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    kind = facts.get("rope.scaling.type", "none")
    factor = facts.get("rope.scaling.factor") or facts.get("rope.scale_linear") or 1.0
    if kind == "none" and facts.get("rope.scale_linear"):
        kind = "linear"
    long = [name for name in ROPE_FACTORS.values() if name in facts.file.tensors]
    attention = facts.get("rope.scaling.attn_factor", 1.0)
    # By how many of both tensors there are.
    known = (("none", "linear", "yarn"), (), ("none", "longrope"))[len(long)]
    if kind not in known or (attention != 1.0 and not long):
        raise InputError(
            f"rope scaling '{kind}' with attn_factor {attention:g} and {', '.join(long) or 'no tensor of factors'} "
            "is not known",
            where=str(facts.file.path),
            fix="known: none, linear, yarn, longrope with both tensors, and Llama 3's; give the original checkpoint",
        )
    if long:
        return found | _longrope(facts, attention)
    if kind in ("linear", "yarn") and factor != 1.0:
        found |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            found["original_max_position_embeddings"] = _original(facts)
    if ROPE_FREQUENCIES in facts.file.tensors:
        found |= _llama3(facts, found, head_dim)
    return found


def _original(facts: Facts) -> int:
    return int(facts.get("rope.scaling.original_context_length") or facts.need("context_length"))


def _longrope(facts: Facts, attention: float) -> dict[str, Any]:
    """Factors for short and long texts; what cos and sin are multiplied by only where it is not the usual."""
    original = _original(facts)
    found: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": original}
    for kind, name in ROPE_FACTORS.items():
        found[f"{kind}_factor"] = [decimal(value) for value in facts.tensor(name)]
    stretched = max(1.0, facts.need("context_length") / original)
    # As transformers computes it where the configuration does not say.
    usual = math.sqrt(1 + math.log(stretched) / math.log(max(2, original)))
    return found if decimal(usual) == attention else found | {"attention_factor": attention}


def _llama3(facts: Facts, plain: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """The parameters whose frequencies the file's factors are; InputError where none of the usual ones fit."""
    stored = facts.tensor(ROPE_FREQUENCIES)
    factor = float(stored.max())
    if factor == 1.0:
        return {}
    low, high = LLAMA3_FREQUENCIES
    frequencies = plain["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    for length in LLAMA3_LENGTHS:
        # Llama 3's scaling, as transformers computes it (modeling_rope_utils): waves longer than length / low are
        # slowed by the factor, those shorter than length / high stay, and between them it changes smoothly.
        smooth = np.clip((length * frequencies / (2 * np.pi) - low) / (high - low), 0, 1)
        wanted = 1 / ((1 - smooth) / factor + smooth)
        if len(stored) == len(wanted) and np.allclose(stored, wanted, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": decimal(factor),
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }
    raise InputError(
        f"{ROPE_FREQUENCIES} is no scaling of Llama 3's kind with the usual factors {low:g} and {high:g}",
        where=str(facts.file.path),
        fix="give the original checkpoint",
    )
