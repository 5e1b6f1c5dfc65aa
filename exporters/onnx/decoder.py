"""The graph of a decoder, from its spec alone: norms, attention, feed-forward, head, and what scales them.

Inputs and outputs are named as optimum's ORTModelForCausalLM and onnxruntime-genai expect. Rows of a batch may be
padded anywhere.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compress.models.topology import DecoderSpec
from compress.rotation import make_rotation
from compress.session import CompressedModel
from exporters.onnx.attention import AttentionWriter
from exporters.onnx.feed_forward import FeedForwardWriter
from exporters.onnx.layers import LayerWriter, Levels
from exporters.onnx.limits import DIALECTS, STANDARD, context_length
from exporters.onnx.standard import StandardAttention, StandardLayers
from exporters.onnx.stream import turned_gains
from exporters.onnx.writer import FLOAT, INT64, GraphWriter

CONTEXT_LENGTH = "context_length"
"""Property of the model file: the longest sequence that its rotary tables serve."""
CACHE, GROWING = "cache", "growing"
"""Property of a file whose cache is a new tensor at each step; that of others may be one buffer, written in place."""
_DIALECTS = dict(zip(DIALECTS, ((LayerWriter, AttentionWriter), (StandardLayers, StandardAttention)), strict=True))


def write_decoder(
    model: CompressedModel, spec: DecoderSpec, path: Path, levels: Levels, float_type: str, dialect: str, padding: bool
) -> None:
    """Write ``path`` and its data file, layer by layer. OSError passes through."""
    layers_type, attention_type = _DIALECTS[dialect]
    with GraphWriter(path, float_type, standard=dialect == STANDARD) as writer:
        layers = layers_type(model, spec, writer, levels)
        _Decoder(spec, writer, layers, attention_type(model, spec, writer, layers, padding)).build()
        properties = {CONTEXT_LENGTH: str(context_length(spec)), "base_model": model.name}
        writer.save(properties | ({CACHE: GROWING} if dialect == STANDARD else {}))


class _Decoder:
    """One graph under construction. Methods return names of values; hidden states are [batch, sequence, hidden]."""

    def __init__(self, spec: DecoderSpec, writer: GraphWriter, layers: LayerWriter, attention: AttentionWriter) -> None:
        self._spec = spec
        self._writer = writer
        self._layers = layers
        self._attention = attention
        self._branches = {
            "attention": attention.write,
            "feed_forward": FeedForwardWriter(spec, writer, layers).write,
        }

    def build(self) -> None:
        """Everything from input_ids to logits."""
        spec, scaling, writer = self._spec, self._spec.scaling, self._writer
        input_ids = writer.input("input_ids", INT64, ["batch_size", "sequence_length"])
        mask = writer.input("attention_mask", INT64, ["batch_size", "total_sequence_length"])
        embedded = self._layers.embedding(spec.family.embedding, self._attention.prepare(input_ids, mask))
        residual, branch = self._scaled(embedded, scaling.embedding), None
        for index in range(spec.layers):
            for role, write in self._branches.items():
                entering, residual = self._enter(self._norm(index, role), residual, branch)
                branch = self._leave(self._norm(index, f"{role}_out"), write(index, entering))
        self._head(self._attention.finish(self._final_norm(residual, branch)))

    def _final_norm(self, residual: str, branch: str | None) -> str:
        """What enters the head, which is linear: what scales its outputs may as well scale its inputs."""
        spec = self._spec
        norm, seed = spec.family.final_norm, spec.stream_rotation
        gains = self._layers.gains(norm) * np.float32(spec.scaling.logits)
        if seed is None:
            return self._enter(norm, residual, branch, gains)[0]
        normed, _ = self._enter(norm, residual, branch, np.ones_like(gains))
        return turned_gains(self._writer, make_rotation(spec.hidden_size, seed), normed, gains)

    def _norm(self, index: int, role: str) -> str | None:
        return self._spec.norm(index, role) if role in self._spec.family.norms else None

    def _enter(
        self, norm: str | None, residual: str, branch: str | None, gains: NDArray[np.float32] | None = None
    ) -> tuple[str, str]:
        """(what enters a branch, the residual stream with the last branch added); before the first there is none."""
        if branch is None:
            return (residual if norm is None else self._layers.norm(norm, residual, gains)), residual
        if norm is None:
            total = self._writer.node("Add", [residual, branch], f"{branch}.added")
            return total, total
        return self._layers.add_and_norm(norm, residual, branch, gains)

    def _leave(self, norm: str | None, branch: str) -> str:
        """What a branch adds to the residual stream."""
        normed = branch if norm is None else self._layers.norm(norm, branch)
        return self._scaled(normed, self._spec.scaling.residual)

    def _scaled(self, value: str, factor: float) -> str:
        if factor == 1.0:
            return value
        return self._writer.node("Mul", [value, self._writer.constant(float(factor))], f"{value}.scaled")

    def _head(self, hidden: str) -> None:
        """Logits, which are fp32 whatever the graph computes in."""
        spec, cap, writer = self._spec, self._spec.scaling.logits_cap, self._writer
        writer.output("logits", FLOAT, ["batch_size", "sequence_length", spec.vocab_size])
        output = "logits" if cap is None and writer.float_type == FLOAT else "head_outputs"
        if spec.tied:
            self._layers.tied_head(spec.family.embedding, spec.family.head, hidden, output)
        else:
            self._layers.linear(spec.family.head, hidden, output)
        if cap is not None:
            limit = writer.constant(float(cap))
            squashed = writer.node("Tanh", [writer.node("Div", [output, limit], "head_in_caps")], "head_squashed")
            output = writer.node("Mul", [squashed, limit], "head_capped")
        if output != "logits":
            writer.node("Cast", [output], "logits", to=FLOAT)
