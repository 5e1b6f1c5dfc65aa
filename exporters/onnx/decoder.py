"""The graph of a decoder: norms, attention with rotary and a key/value cache, gated feed-forward, head.

Inputs and outputs are named as optimum's ORTModelForCausalLM and onnxruntime-genai expect. Rows of a batch may be
padded on the right. Padding on the left would shift GroupQueryAttention's view of the cache: it is refused at run time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from compress.models.topology import DecoderSpec, rope_frequencies
from compress.session import CompressedModel
from exporters.onnx.layers import LayerWriter
from exporters.onnx.limits import ACTIVATIONS
from exporters.onnx.writer import FLOAT, INT32, INT64, MICROSOFT, Dims, GraphWriter

PAST = "past_key_values.{index}.{part}"
PRESENT = "present.{index}.{part}"
CONTEXT_LENGTH = "context_length"
"""Property of the model file: the longest sequence that its rotary tables serve."""

_TO_THE_END = 2**63 - 1


def write_decoder(model: CompressedModel, spec: DecoderSpec, path: Path, accuracy_level: int) -> None:
    """Write ``path`` and its data file, layer by layer. OSError passes through."""
    with GraphWriter(path) as writer:
        _Decoder(model, spec, writer, LayerWriter(model, writer, accuracy_level)).build()
        writer.save({CONTEXT_LENGTH: str(spec.max_positions), "base_model": model.name})


class _Decoder:
    """One graph under construction. Methods return names of values; hidden states: fp32 [batch, sequence, hidden]."""

    def __init__(self, model: CompressedModel, spec: DecoderSpec, writer: GraphWriter, layers: LayerWriter) -> None:
        self._model = model
        self._spec = spec
        self._writer = writer
        self._layers = layers
        # GroupQueryAttention rotates heads of a multiple of 16 itself; others take an operator of their own.
        self._rotates_inside = spec.head_dim % 16 == 0

    def build(self) -> None:
        """Everything from input_ids to logits."""
        spec = self._spec
        input_ids = self._writer.input("input_ids", INT64, ["batch_size", "sequence_length"])
        self._writer.input("attention_mask", INT64, ["batch_size", "total_sequence_length"])
        self._lengths()
        self._rotary_tables()
        if not self._rotates_inside:
            self._position_ids(input_ids)
        residual = self._layers.embedding(spec.family.embedding, input_ids)
        branch: str | None = None
        for index in range(spec.layers):
            normed, residual = self._add_and_norm(spec.norm(index, "attention"), residual, branch)
            branch = self._attention(index, normed)
            normed, residual = self._add_and_norm(spec.norm(index, "feed_forward"), residual, branch)
            branch = self._feed_forward(index, normed)
        normed, _ = self._add_and_norm(spec.family.final_norm, residual, branch)
        self._head(normed)

    def _lengths(self) -> None:
        """``seqlens_k`` int32 [batch]: each row's last token; ``total_sequence_length`` int32: width of the mask."""
        writer = self._writer
        count = writer.node("ReduceSum", ["attention_mask", writer.integers("axis_1", [1])], "token_count", keepdims=0)
        last = writer.node("Sub", [count, writer.integers("one", 1)], "last_token")
        first = writer.node("Gather", ["attention_mask", writer.integers("zero", 0)], "first_column", axis=1)
        padded = writer.node("Sub", ["one", first], "rows_padded_on_the_left")
        # The table has one entry: reading entry 1, a row padded on the left, is an error that names this node.
        checked = writer.node(
            "Gather", [writer.integers("no_padding_on_the_left", [0]), padded], "padding_on_the_left_is_not_supported"
        )
        writer.node("Cast", [writer.node("Add", [last, checked], "last_token_checked")], "seqlens_k", to=INT32)
        shape = writer.node("Shape", ["attention_mask"], "mask_shape")
        total = writer.node("Gather", [shape, "one"], "mask_width", axis=0)
        writer.node("Cast", [total], "total_sequence_length", to=INT32)

    def _position_ids(self, input_ids: str) -> None:
        """``position_ids`` int64 [batch, sequence]: how many tokens of the row come before each."""
        writer = self._writer
        seen = writer.node("CumSum", ["attention_mask", "one"], "tokens_seen")
        positions = writer.node("Sub", [seen, "one"], "all_positions")
        width = writer.node("Shape", [input_ids], "sequence_shape", start=1, end=2)
        start = writer.node("Neg", [width], "first_new_position")
        writer.node("Slice", [positions, start, writer.integers("end", [_TO_THE_END]), "axis_1"], "position_ids")

    def _rotary_tables(self) -> None:
        """``cos_cache`` and ``sin_cache`` fp32 [max_positions, head_dim / 2], in the arithmetic of transformers."""
        frequencies, factor = rope_frequencies(self._model.config)
        positions = torch.arange(self._spec.max_positions, dtype=torch.float32)
        angles = torch.outer(positions, torch.tensor(frequencies, dtype=torch.float32))
        for name, table in (("cos_cache", angles.cos()), ("sin_cache", angles.sin())):
            self._writer.tensor(name, (table * factor).numpy())

    def _dense(self, name: str) -> NDArray[np.float32]:
        array: NDArray[np.float32] = self._model.dense(name).float().numpy()
        return array

    def _add_and_norm(self, norm: str, residual: str, branch: str | None) -> tuple[str, str]:
        """(RMS norm of residual + branch, that sum); the sum is ``residual`` itself before the first block."""
        weight = self._writer.tensor(f"{norm}.weight", self._dense(f"{norm}.weight"))
        epsilon = self._spec.norm_eps
        if branch is None:
            normed = self._writer.node(
                "SimplifiedLayerNormalization", [residual, weight], norm, epsilon=epsilon, axis=-1, stash_type=1
            )
            return normed, residual
        total = f"{norm}.sum"
        normed = self._writer.node(
            "SkipSimplifiedLayerNormalization",
            [branch, residual, weight],
            norm,
            outputs=[norm, "", "", total],
            domain=MICROSOFT,
            epsilon=epsilon,
        )
        return normed, total

    def _attention(self, index: int, hidden: str) -> str:
        spec, writer = self._spec, self._writer
        query, key, value = (self._layers.linear(spec.linear(index, role), hidden) for role in ("q", "k", "v"))
        tables = ["cos_cache", "sin_cache"]
        if not self._rotates_inside:
            query, key = (self._rotate(projection) for projection in (query, key))
            tables = []
        past, present = [], []
        for part in ("key", "value"):
            names = PAST.format(index=index, part=part), PRESENT.format(index=index, part=part)
            past_dims: Dims = ["batch_size", spec.kv_heads, "past_sequence_length", spec.head_dim]
            past.append(writer.input(names[0], FLOAT, past_dims))
            writer.output(names[1], FLOAT, [*past_dims[:2], "total_sequence_length", spec.head_dim])
            present.append(names[1])
        attention = f"{spec.family.block.format(index=index)}.attention"
        mixed = writer.node(
            "GroupQueryAttention",
            [query, key, value, *past, "seqlens_k", "total_sequence_length", *tables],
            attention,
            outputs=[attention, *present],
            domain=MICROSOFT,
            num_heads=spec.heads,
            kv_num_heads=spec.kv_heads,
            do_rotary=int(self._rotates_inside),
        )
        return self._layers.linear(spec.linear(index, "o"), mixed)

    def _rotate(self, projection: str) -> str:
        """Rotary on [batch, sequence, heads * head_dim]; the head size follows from the width of the tables."""
        inputs = [projection, "position_ids", "cos_cache", "sin_cache"]
        return self._writer.node("RotaryEmbedding", inputs, f"{projection}.rotated", domain=MICROSOFT)

    def _feed_forward(self, index: int, hidden: str) -> str:
        spec, writer = self._spec, self._writer
        gate = self._layers.linear(spec.linear(index, "gate"), hidden)
        up = self._layers.linear(spec.linear(index, "up"), hidden)
        product = writer.node("Mul", [self._activation(gate), up], f"{gate}.gated")
        return self._layers.linear(spec.linear(index, "down"), product)

    def _activation(self, gate: str) -> str:
        writer, name = self._writer, f"{gate}.activated"
        kind = ACTIVATIONS[self._spec.activation]
        if kind == "silu":
            return writer.node("Mul", [gate, writer.node("Sigmoid", [gate], f"{gate}.sigmoid")], name)
        if kind == "relu":
            return writer.node("Relu", [gate], name)
        return writer.node("Gelu", [gate], name, approximate="tanh" if kind == "gelu_tanh" else "none")

    def _head(self, hidden: str) -> None:
        spec = self._spec
        self._writer.output("logits", FLOAT, ["batch_size", "sequence_length", spec.vocab_size])
        if spec.tied:
            self._layers.tied_head(spec.family.embedding, spec.family.head, hidden, "logits")
        else:
            self._layers.linear(spec.family.head, hidden, "logits")
