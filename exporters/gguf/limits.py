"""What llama.cpp's graphs do not compute of a model, and what a file cannot hold of a plan, before any work."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields

from compress.models.topology import DecoderSpec, Scaling
from compress.scheme import FLOAT, QuantScheme
from exporters.gguf.families import GGUF_FAMILIES, GgufFamily
from exporters.gguf.rope import LONGROPE, rope_complaints, rope_type, ropes
from exporters.gguf.storage import complaint
from exporters.gguf.tensors import any_expert, expert_number, gathered


def complaints(
    spec: DecoderSpec,
    plan: Mapping[str, QuantScheme],
    shapes: Mapping[str, tuple[int, int]],
    biased: Collection[str],
) -> list[str]:
    """Everything in this model and plan that a file cannot hold, or llama.cpp not compute, one an offender.

    ``biased`` are the layers with a bias.
    """
    row = GGUF_FAMILIES[spec.family.name]
    stored = (complaint(layer, shapes[layer], scheme) for layer, scheme in plan.items())
    return [
        *_spec_complaints(spec, row),
        *_bias_complaints(spec, row, biased),
        *(text for text in stored if text),
        *_expert_complaints(spec, plan),
    ]


def _spec_complaints(spec: DecoderSpec, row: GgufFamily) -> Iterator[str]:
    name = row.architecture
    if spec.activation != row.activation:
        yield f"llama.cpp computes {name} with {row.activation}, not '{spec.activation}'"
    yield from _scaling_complaints(spec, row)
    yield from rope_complaints(spec, row)
    layers = [*spec.ends, *spec.all_linears(), *spec.float_linears()]
    for layer in gathered(name, spec.layers, layers).get(None, ()):
        yield f"{layer}: llama.cpp's {name} has no such layer"
    if spec.stream_rotation is not None:
        yield "rotate: {keep_tied: true}: llama.cpp's graphs cannot turn back for the final norm; leave keep_tied out"
    if spec.tied and not row.tied:
        yield f"llama.cpp's {name} takes no embedding as its head, which this model has; the pass rotate unties it"
    if spec.experts is not None and spec.experts.normalised != row.normalised:
        does = "scales" if row.normalised else "does not scale"
        yield f"llama.cpp's {name} {does} the probabilities of the chosen experts to a sum of 1 (norm_topk_prob)"


def _scaling_complaints(spec: DecoderSpec, row: GgufFamily) -> Iterator[str]:
    computed = row.computed(spec)
    for field in fields(Scaling):
        wanted, usual = getattr(spec.scaling, field.name), getattr(computed, field.name)
        if field.name in row.scaling_keys and wanted is not None:
            continue
        same = wanted == usual if None in (wanted, usual) else math.isclose(wanted, usual, rel_tol=1e-6)
        if not same:
            yield f"{field.name} scaled by {wanted}: llama.cpp's {row.architecture} computes it with {usual}"


def one_scheme(spec: DecoderSpec) -> list[tuple[str, ...]]:
    """Layers that a file holds in one tensor, which has one type: the same projection of all experts of a block."""
    row = GGUF_FAMILIES[spec.family.name]
    held = gathered(row.architecture, spec.layers, spec.all_linears())
    return [layers for name, layers in held.items() if name is not None and len(layers) > 1]


def _bias_complaints(spec: DecoderSpec, row: GgufFamily, biased: Collection[str]) -> Iterator[str]:
    for role, name in spec.family.linears.items():
        blocks = [index for index in range(spec.layers) if spec.linear(index, role) in biased]
        if blocks and role not in row.biases:
            yield f"{name} has a bias in {len(blocks)} blocks, which llama.cpp's {row.architecture} does not know"


def _expert_complaints(spec: DecoderSpec, plan: Mapping[str, QuantScheme]) -> Iterator[str]:
    for layers in one_scheme(spec):
        found: dict[str, list[int | None]] = {}
        for layer in layers:
            found.setdefault(str(plan.get(layer, FLOAT)), []).append(expert_number(layer))
        if len(found) > 1:
            said = "; ".join(f"{scheme}: {', '.join(map(str, numbers))}" for scheme, numbers in found.items())
            yield f"{any_expert(layers[0])}: GGUF stores them as one tensor, with one scheme, and they have {said}"


def context_length(spec: DecoderSpec) -> int:
    """Tokens of the longest sequence that llama.cpp computes as the model does: it ignores some windows."""
    windows = [] if GGUF_FAMILIES[spec.family.name].windows else [kind.window for kind in spec.attentions]
    return min([spec.max_positions, *(window for window in windows if window is not None)])


def remarks(spec: DecoderSpec) -> Sequence[str]:
    """What a user of a file of this model should know."""
    row = GGUF_FAMILIES[spec.family.name]
    found, length = [], context_length(spec)
    if length < spec.max_positions:
        found.append(
            f"the file takes {length} tokens of the model's {spec.max_positions}: llama.cpp's {row.architecture} "
            f"knows no sliding window, and beyond {length} tokens the model has one"
        )
    for rope in ropes(spec, row)[0]:
        if rope_type(rope) == LONGROPE:
            original = rope["original_max_position_embeddings"]
            found.append(
                f"llama.cpp takes the long factors of {LONGROPE} for every text once it is opened for more than "
                f"{original} tokens (rounded up to 256); the model takes them for a text that is longer"
            )
    return found
