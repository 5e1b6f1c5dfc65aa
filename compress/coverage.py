"""How many calibration tokens reached each layer and each expert, against what its statistics need."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compress.models.topology import DecoderSpec
from compress.passes.gptq import TOKENS_PER_COLUMN
from compress.report import PassRecord


def token_coverage(
    spec: DecoderSpec, shapes: Mapping[str, tuple[int, int]], passes: Sequence[PassRecord]
) -> dict[str, Any] | None:
    """Tokens against ``TOKENS_PER_COLUMN`` times columns, as plain JSON values; None if no pass looked at inputs.

    ``layers``: those that every token passes, alike ones in one row. ``experts``: one row a block, with the experts
    that too few tokens reached (expert -> tokens).
    """
    seen: dict[str, int] = {}
    for record in passes:
        if any(layer.tokens for layer in record.layers):
            for layer in record.layers:
                seen[layer.layer] = max(layer.tokens, seen.get(layer.layer, 0))
    # An embedding multiplies nothing: it has no inputs. A cache is no layer.
    seen = {name: tokens for name, tokens in seen.items() if name in shapes and name != spec.family.embedding}
    if not seen:
        return None
    routed = [spec.expert_linears(index) for index in range(spec.layers)]
    of_experts = {name for block in routed for expert in block for name in expert.values()}
    alike: dict[tuple[int, int], list[str]] = {}
    for name, tokens in seen.items():
        if name not in of_experts:
            alike.setdefault((shapes[name][1], tokens), []).append(name)
    layers = [
        {
            "layers": list(dict.fromkeys(_pattern(spec, name) for name in group)),
            "count": len(group),
            "columns": columns,
            "tokens": tokens,
            "needed": TOKENS_PER_COLUMN * columns,
            "enough": tokens >= TOKENS_PER_COLUMN * columns,
        }
        for (columns, tokens), group in alike.items()
    ]
    experts = [row for index, block in enumerate(routed) if (row := _experts(index, block, shapes, seen)) is not None]
    return {"layers": layers, "experts": experts}


def _experts(
    index: int, block: Sequence[Mapping[str, str]], shapes: Mapping[str, tuple[int, int]], seen: Mapping[str, int]
) -> dict[str, Any] | None:
    """The row of block ``index``; None if it has no experts, or no pass looked at theirs."""
    known = {
        number: [name for name in expert.values() if name in seen]
        for number, expert in enumerate(block)
        if any(name in seen for name in expert.values())
    }
    if not known:
        return None
    # All layers of an expert see the same tokens; the widest needs most of them.
    tokens = {number: max(seen[name] for name in names) for number, names in known.items()}
    needed = TOKENS_PER_COLUMN * max(shapes[name][1] for names in known.values() for name in names)
    return {
        "block": index,
        "experts": len(tokens),
        "min": min(tokens.values()),
        "median": statistics.median(tokens.values()),
        "max": max(tokens.values()),
        "needed": needed,
        "short": {str(number): count for number, count in tokens.items() if count < needed},
    }


def coverage_warnings(coverage: Mapping[str, Any] | None) -> Iterator[str]:
    """One line for each kind of layer, and one for the experts, that too few tokens reached."""
    if coverage is None:
        return
    for row in coverage["layers"]:
        if not row["enough"]:
            yield (
                f"calibration: {', '.join(row['layers'])} ({row['count']} layers) saw {row['tokens']} tokens, fewer "
                f"than {TOKENS_PER_COLUMN} for each of {row['columns']} columns: give more or longer samples"
            )
    short = sum(len(row["short"]) for row in coverage["experts"])
    if short:
        experts = sum(row["experts"] for row in coverage["experts"])
        yield (
            f"calibration: {short} of {experts} experts saw fewer than {TOKENS_PER_COLUMN} tokens for each column "
            f"(listed under Text): give more or longer samples"
        )


def _pattern(spec: DecoderSpec, layer: str) -> str:
    """``model.layers.3.mlp.up_proj`` as ``model.layers.*.mlp.up_proj``."""
    block = re.escape(spec.family.block).replace(r"\{index\}", r"\d+")
    return re.sub(rf"^{block}\.", f"{spec.family.block.format(index='*')}.", layer)
