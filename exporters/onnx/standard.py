"""The same graph in operators of the ONNX standard alone (opset 23), for runtimes that lack ONNX Runtime's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compress.models.topology import DecoderSpec
from compress.session import CompressedModel
from exporters.onnx.attention import AttentionWriter, RotaryTables
from exporters.onnx.layers import LayerWriter, Levels
from exporters.onnx.layout import to_columns
from exporters.onnx.rows import TO_THE_END
from exporters.onnx.writer import BOOL, GraphWriter


@dataclass(frozen=True)
class _Columns:
    """Names of one quantised layer's tensors in the graph, and its block."""

    codes: str
    scale: str
    zero_points: str | None
    block: int


class StandardLayers(LayerWriter):
    """Layers as blocked DequantizeLinear and MatMul. A node that reads codes carries the layer's name."""

    def __init__(self, model: CompressedModel, spec: DecoderSpec, writer: GraphWriter, levels: Levels) -> None:
        super().__init__(model, spec, writer, levels)
        self._embeddings_stored: dict[str, _Columns] = {}

    def joined(self, layers: Sequence[str], value: str) -> str | None:
        """None: each layer has a product of its own."""
        return None

    def norm(self, norm: str, value: str, gains: NDArray[np.float32] | None = None) -> str:
        """RMS norm over the last axis, times its gains, or ``gains`` [hidden]."""
        inputs = [value, self._norm_weight(norm, gains)]
        return self._writer.node("RMSNormalization", inputs, norm, epsilon=self._spec.norm_eps, axis=-1)

    def add_and_norm(
        self, norm: str, residual: str, branch: str, gains: NDArray[np.float32] | None = None
    ) -> tuple[str, str]:
        """(:meth:`norm` of residual + branch; that sum)."""
        total = self._writer.node("Add", [residual, branch], f"{norm}.sum")
        return self.norm(norm, total, gains), total

    def embedding(self, layer: str, input_ids: str) -> str:
        """Rows of the embedding [batch, sequence, hidden]; codes lie as a head's would, and serve a tied one."""
        if layer not in self._model.schemes:
            return super().embedding(layer, input_ids)
        writer = self._writer
        stored = self._embeddings_stored[layer] = self._store_columns(layer)
        codes = writer.node("Gather", [stored.codes, input_ids], layer, [f"{layer}.columns"], axis=1)
        parts = {"codes": codes, "scale": self._gathered(layer, "scale", stored.scale, input_ids)}
        if stored.zero_points is not None:
            parts["zero"] = self._gathered(layer, "zero", stored.zero_points, input_ids)
        rows = {
            name: writer.node("Transpose", [value], f"{layer}.{name}.row", perm=[1, 2, 0])
            for name, value in parts.items()
        }
        for name in [name for name in rows if name != "scale"]:
            rows[name] = writer.node("Cast", [rows[name]], f"{layer}.{name}.float", to=writer.float_type)
        shape = writer.constant([0, 0, -1, stored.block])
        blocks = writer.node("Reshape", [rows["codes"], shape], f"{layer}.blocks")
        axis = writer.constant([3])
        if "zero" in rows:
            zero = writer.node("Unsqueeze", [rows["zero"], axis], f"{layer}.zero.column")
            blocks = writer.node("Sub", [blocks, zero], f"{layer}.centred")
        scale = writer.node("Unsqueeze", [rows["scale"], axis], f"{layer}.scale.column")
        scaled = writer.node("Mul", [blocks, scale], f"{layer}.scaled")
        return writer.node("Reshape", [scaled, writer.constant([0, 0, -1])], f"{layer}.rows")

    def tied_head(self, embedding: str, head: str, value: str, output: str) -> str:
        """``value @ embedding.T``, from the very tensors that :meth:`embedding` stored."""
        if embedding not in self._model.schemes:
            return super().tied_head(embedding, head, value, output)
        weight = self._dequantised(f"{head}.weight", self._embeddings_stored[embedding])
        return self._matmul(head, [value, weight], output, self._bias(head))

    def _gathered(self, layer: str, name: str, stored: str, input_ids: str) -> str:
        return self._writer.node("Gather", [stored, input_ids], f"{layer}.{name}.columns", axis=1)

    def _quantised(self, layer: str, value: str, output: str, bias: str | None) -> str:
        weight = self._dequantised(layer, self._store_columns(layer))
        return self._matmul(f"{layer}.matmul", [value, weight], output, bias)

    def _dequantised(self, node: str, stored: _Columns) -> str:
        inputs = [stored.codes, stored.scale, *([stored.zero_points] if stored.zero_points else [])]
        return self._writer.node(
            "DequantizeLinear", inputs, node, [f"{node}.dequantised"], axis=0, block_size=stored.block
        )

    def _store_columns(self, layer: str) -> _Columns:
        packed, writer = to_columns(layer, self._model.quantized(layer)), self._writer
        zero_points = None
        if packed.zero_points is not None:
            shape = packed.scales.shape
            zero_points = writer.packed(f"{layer}.zero_points", packed.zero_points, shape, packed.type)
        codes = writer.packed(f"{layer}.codes", packed.codes, packed.shape, packed.type)
        return _Columns(codes, self._scales(layer, packed.scales), zero_points, packed.block)


class StandardAttention(AttentionWriter):
    """Attention with masks made from the attention mask; the cache keeps padding, as transformers' does."""

    def __init__(
        self, model: CompressedModel, spec: DecoderSpec, writer: GraphWriter, layers: LayerWriter, padding: bool = True
    ) -> None:
        super().__init__(model, spec, writer, layers, padding)
        self._masks: set[str] = set()

    def prepare(self, input_ids: str, attention_mask: str) -> str:
        """Positions and what masks are made of; ``input_ids`` stay as they are."""
        writer, one = self._writer, self._writer.constant(1)
        length = writer.node("Shape", [input_ids], "sequence_length", start=1, end=2)
        total = writer.node("Shape", [attention_mask], "mask_shape", start=1, end=2)
        new_count, count = (writer.node("Squeeze", [value], f"{value}_scalar") for value in (length, total))
        first = writer.node("Sub", [count, new_count], "first_new_column")
        seen = writer.node("CumSum", [attention_mask, one], "tokens_seen")
        before = writer.node("Max", [writer.node("Sub", [seen, one], "tokens_before"), writer.constant(0)], "positions")
        start = writer.node("Neg", [length], "minus_sequence_length")
        bounds = [start, writer.constant([TO_THE_END]), writer.constant([1])]
        writer.node("Slice", [before, *bounds], "position_ids")
        columns = writer.node("Range", [writer.constant(0), count, one], "columns")
        new = writer.node("Range", [first, count, one], "new_columns")
        rows = writer.node("Unsqueeze", [new, writer.constant([1])], "new_columns_column")
        real = writer.node("Cast", [attention_mask], "real", to=BOOL)
        keys = writer.node("Unsqueeze", [real, writer.constant([1, 2])], "real_keys")
        past = writer.node("LessOrEqual", [columns, rows], "not_ahead")
        writer.node("And", [past, keys], "visible")
        # Padding sees itself: a row of a softmax over nothing would be no number.
        writer.node("Equal", [columns, rows], "itself")
        return input_ids

    def finish(self, hidden: str) -> str:
        """Nothing was moved."""
        return hidden

    def _rotates_inside(self, tables: RotaryTables) -> bool:
        return False

    def _rotate(self, projection: str, width: int, tables: RotaryTables) -> str:
        return self._writer.node(
            "RotaryEmbedding",
            [projection, tables.cos, tables.sin, "position_ids"],
            f"{projection}.rotated",
            num_heads=width // self._spec.head_dim,
            rotary_embedding_dim=2 * tables.pairs,
        )

    def _mix(
        self, index: int, heads: dict[str, str], past: list[str], present: list[str], tables: RotaryTables | None
    ) -> str:
        spec = self._spec
        attention = f"{spec.family.block.format(index=index)}.attention"
        mask = self._mask(spec.attentions[index].window)
        return self._writer.node(
            "Attention",
            [*(heads[role] for role in "qkv"), mask, *past],
            attention,
            outputs=[attention, *present],
            q_num_heads=spec.heads,
            kv_num_heads=spec.kv_heads,
            scale=spec.scaling.attention,
            softcap=spec.scaling.attention_cap or 0.0,
        )

    def _mask(self, window: int | None) -> str:
        """bool [batch, 1, sequence, total]; blocks with the same window share theirs."""
        name = "mask" if window is None else f"mask.{window}"
        if name in self._masks:
            return name
        self._masks.add(name)
        writer, seen = self._writer, "visible"
        if window is not None:
            key = writer.node("Unsqueeze", ["positions", writer.constant([1, 2])], f"{name}.keys")
            query = writer.node("Unsqueeze", ["position_ids", writer.constant([1, 3])], f"{name}.queries")
            distance = writer.node("Sub", [query, key], f"{name}.distance")
            near = writer.node("Less", [distance, writer.constant(window)], f"{name}.near")
            seen = writer.node("And", [seen, near], f"{name}.visible")
        return writer.node("Or", [seen, "itself"], name)
