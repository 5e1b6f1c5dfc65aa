"""Rotary positions: the keys and tensors that state them, and what llama.cpp computes of each type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from compress.models.topology import DecoderSpec, rope_frequencies
from exporters.gguf.families import GgufFamily

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter
    from numpy.typing import NDArray

Rope = Mapping[str, Any]
LONGROPE = "longrope"

_YARN_FIXED: Mapping[str, object] = MappingProxyType(
    {
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
        "beta_fast": 32,
        "beta_slow": 1,
        "truncate": True,
    }
)
"""What llama.cpp 0.3.36 computes whatever the file says: its beta keys are read and not used (tried)."""


def rope_type(rope: Rope) -> str:
    """``rope_type`` of a checkpoint's parameters, which is ``default`` where it is not said."""
    return str(rope.get("rope_type", "default"))


def ropes(spec: DecoderSpec, row: GgufFamily) -> tuple[list[Rope], list[Rope]]:
    """The different parameters of (blocks that see everything, blocks with a base of their own)."""
    sides: tuple[list[Rope], list[Rope]] = ([], [])
    for kind in spec.attentions:
        side = sides[row.local_rope and kind.window is not None]
        if kind.rope is not None and kind.rope not in side:
            side.append(kind.rope)
    return sides


def rope_complaints(spec: DecoderSpec, row: GgufFamily) -> Iterator[str]:
    """What llama.cpp does not compute of this model's positions, one complaint each."""
    main, local = ropes(spec, row)
    for side in (main, local):
        if len(side) > 1:
            yield f"blocks differ in their rotary positions, which llama.cpp's {row.architecture} cannot: {side}"
    for rope in main:
        yield from _type_complaints(rope, row)
    for rope in local:
        if rope_type(rope) != "default":
            yield f"rope type '{rope_type(rope)}' in blocks with a window: llama.cpp computes them as 'default'"
    stated = [kind.rope is not None for kind in spec.attentions]
    rotated = list(row.positions(spec))
    if stated != rotated:
        wrong = [index for index, (one, other) in enumerate(zip(stated, rotated, strict=True)) if one != other]
        yield (
            f"blocks {', '.join(map(str, wrong))}: llama.cpp's {row.architecture} rotates heads in blocks "
            f"{', '.join(str(index) for index, turned in enumerate(rotated) if turned)} alone"
        )


def _type_complaints(rope: Rope, row: GgufFamily) -> Iterator[str]:
    kind = rope_type(rope)
    if kind not in row.rope_types:
        yield (
            f"rope type '{kind}' is none that llama.cpp computes for {row.architecture}; "
            f"known: {', '.join(row.rope_types)}"
        )
    share = rope.get("partial_rotary_factor")
    if share not in (None, 1, 1.0) and not row.partial:
        yield f"rotary positions over {share} of a head is not what llama.cpp computes for {row.architecture}"
    if kind == "yarn":
        for key, fixed in _YARN_FIXED.items():
            if rope.get(key) not in (None, fixed):
                usual = "not set" if fixed is None else fixed
                yield f"rope type 'yarn' with {key}={rope[key]}: llama.cpp computes it as if that were {usual}"


def add_rope(writer: GGUFWriter, spec: DecoderSpec, row: GgufFamily, config: Mapping[str, Any]) -> None:
    """The keys of a model without complaints."""
    from gguf import RopeScalingType

    main, local = ropes(spec, row)
    rope = [*main, *local][0]
    writer.add_rope_dimension_count(_rotated(spec, rope))
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    for own in local:
        writer.add_rope_freq_base_swa(float(own["rope_theta"]))
    kind = rope_type(rope)
    if kind in ("linear", "yarn", LONGROPE):
        writer.add_rope_scaling_type(RopeScalingType(kind))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if kind in ("yarn", LONGROPE):
        original = rope.get("original_max_position_embeddings") or spec.max_positions
        writer.add_rope_scaling_orig_ctx_len(int(original))
    if kind == LONGROPE:
        writer.add_rope_scaling_attn_factors(rope_frequencies(config, _first_rotated(spec))[1])


def rope_tensors(config: Mapping[str, Any], spec: DecoderSpec, row: GgufFamily) -> dict[str, NDArray[np.float32]]:
    """Name -> what llama.cpp divides the plain rotary frequencies by, float32 [pairs of a head]."""
    import numpy as np

    main, local = ropes(spec, row)
    rope = [*main, *local][0]
    kind = rope_type(rope)
    if kind == LONGROPE:
        lengths = ("long", "short")
        return {f"rope_factors_{length}.weight": np.array(rope[f"{length}_factor"], np.float32) for length in lengths}
    if kind != "llama3":
        return {}
    wanted = np.array(rope_frequencies(config, _first_rotated(spec))[0])
    plain = float(rope["rope_theta"]) ** -(np.arange(0, spec.head_dim, 2) / spec.head_dim)
    return {"rope_freqs.weight": (plain / wanted).astype(np.float32)}


def _rotated(spec: DecoderSpec, rope: Rope) -> int:
    return int(spec.head_dim * (rope.get("partial_rotary_factor") or 1.0))


def _first_rotated(spec: DecoderSpec) -> int:
    return next(index for index, kind in enumerate(spec.attentions) if kind.rope is not None)
