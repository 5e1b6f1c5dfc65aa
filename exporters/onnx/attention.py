"""Attention of a block as nodes: projections, norms of heads, rotary positions, GroupQueryAttention with its cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from compress.kv import KVScales
from compress.models.topology import DecoderSpec, rope_frequencies
from compress.session import CompressedModel
from exporters.onnx.layers import LayerWriter
from exporters.onnx.limits import ROTATED_MULTIPLE, context_length
from exporters.onnx.rows import count_tokens, pack_rows, unpack_rows, whole_rows
from exporters.onnx.writer import INT8, INT64, MICROSOFT, UINT8, Dims, GraphWriter

PAST = "past_key_values.{index}.{part}"
PRESENT = "present.{index}.{part}"


class RotaryTables(NamedTuple):
    """Names of two tables [positions, pairs], and how many pairs of each head they rotate."""

    cos: str
    sin: str
    pairs: int


def _stored(kv: KVScales | None, head_dim: int, float_type: int) -> tuple[int, int]:
    """Type of the cache, and numbers of it for one head of one token: two of 4 bits share a byte."""
    if kv is None:
        return float_type, head_dim
    return (INT8, head_dim) if kv.scheme.bits == 8 else (UINT8, head_dim // 2)


def _quantised(kv: KVScales | None) -> dict[str, Any]:
    """Attributes of GroupQueryAttention that say how its cache is stored."""
    if kv is None:
        return {}
    kind = "PER_CHANNEL" if kv.scheme.per_channel else "PER_TENSOR"
    return {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": kv.scheme.bits}


class AttentionWriter:
    """Adds attention to a graph. Its rows have their new tokens first: see :mod:`exporters.onnx.rows`.

    Without ``padding`` every column is a token, and none is moved.
    """

    def __init__(
        self, model: CompressedModel, spec: DecoderSpec, writer: GraphWriter, layers: LayerWriter, padding: bool = True
    ) -> None:
        self._model = model
        self._spec = spec
        self._writer = writer
        self._layers = layers
        self._padding = padding
        self._tables: dict[tuple[tuple[float, ...], float], RotaryTables] = {}
        self._positions: str | None = None

    def write(self, index: int, hidden: str) -> str:
        """Attention of block ``index`` over ``hidden`` [batch, sequence, hidden], after the output layer."""
        spec, writer = self._spec, self._writer
        widths = {"q": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}
        widths = {role: heads * spec.head_dim for role, heads in widths.items()}
        tables = self._rotary_tables(index)
        inside = tables is not None and self._rotates_inside(tables)
        packed = self._packed(index, hidden) if inside or tables is None else None
        if packed is not None:
            heads = {"q": packed, "k": "", "v": ""}
        else:
            projected = self._layers.roles(index, widths, hidden)
            heads = {role: self._head_norm(index, role, value) for role, value in projected.items()}
        if tables is not None and not inside:
            heads |= {role: self._rotate(heads[role], widths[role], tables) for role in "qk"}
        past, present = [], []
        dtype, size = _stored(self._scales(index), spec.head_dim, writer.float_type)
        for part in ("key", "value"):
            name = PRESENT.format(index=index, part=part)
            dims: Dims = ["batch_size", spec.kv_heads, "past_sequence_length", size]
            past.append(writer.input(PAST.format(index=index, part=part), dtype, dims))
            writer.output(name, dtype, [*dims[:2], "total_sequence_length", size])
            present.append(name)
        return self._layers.linear(spec.linear(index, "o"), self._mix(index, heads, past, present, tables))

    def _packed(self, index: int, hidden: str) -> str | None:
        """Queries, keys and values side by side, from one product; None where heads have norms or are stored unlike."""
        spec = self._spec
        if spec.family.head_norms:
            return None
        fused = self._layers.fused(index, "qkv")
        if fused is not None:
            return self._layers.linear(fused, hidden)
        return self._layers.joined([spec.linear(index, role) for role in "qkv"], hidden)

    def prepare(self, input_ids: str, attention_mask: str) -> str:
        """What attention needs to know of the batch; tokens int64 [batch, sequence] for the embedding."""
        mask = count_tokens(self._writer, attention_mask)
        return pack_rows(self._writer, input_ids, mask) if self._padding else input_ids

    def finish(self, hidden: str) -> str:
        """Hidden states for the head, in the columns of the input."""
        return unpack_rows(self._writer, hidden) if self._padding else hidden

    def _mix(
        self, index: int, heads: dict[str, str], past: list[str], present: list[str], tables: RotaryTables | None
    ) -> str:
        """Values [batch, sequence, heads * head_dim] as heads mix them; the cache goes from ``past`` to ``present``."""
        spec, kind, kv = self._spec, self._spec.attentions[index], self._scales(index)
        inside = tables is not None and self._rotates_inside(tables)
        attention = f"{spec.family.block.format(index=index)}.attention"
        lengths = ["seqlens_k", "total_sequence_length"]
        rotary = [tables.cos, tables.sin] if tables is not None and inside else ["", ""]
        # Not used: position_ids, attention_bias, head_sink; and, behind the scales, what only other devices read.
        scales = ["", ""] if kv is None else [self._scale(index, part, kv) for part in ("key", "value")]
        new = "query_seqlens" if self._padding else ""
        return self._writer.node(
            "GroupQueryAttention",
            [*(heads[role] for role in "qkv"), *past, *lengths, *rotary, "", "", "", *scales, "", "", new],
            attention,
            outputs=[attention, *present],
            domain=MICROSOFT,
            num_heads=spec.heads,
            kv_num_heads=spec.kv_heads,
            do_rotary=int(inside),
            scale=spec.scaling.attention,
            softcap=spec.scaling.attention_cap or 0.0,
            local_window_size=kind.window or -1,
            **_quantised(kv),
        )

    def _scales(self, index: int) -> KVScales | None:
        return self._model.kv(self._spec.family.block.format(index=index))

    def _scale(self, index: int, part: str, kv: KVScales) -> str:
        """Static scales of the cache, fp32 [1, kv heads, 1, head size], or [1] where one serves all."""
        scale = (kv.key if part == "key" else kv.value).numpy()
        shaped = scale[None, :, None, :] if kv.scheme.per_channel else scale.reshape(1)
        return self._writer.tensor(f"{self._spec.family.block.format(index=index)}.cache.{part}_scale", shaped)

    def _head_norm(self, index: int, role: str, projection: str) -> str:
        """The norm of queries or keys, over each head or over all of them, where the family has one."""
        spec, writer = self._spec, self._writer
        if role not in spec.family.head_norms:
            return projection
        norm = f"{spec.family.block.format(index=index)}.{spec.family.head_norms[role]}"
        if spec.family.whole_head_norms:
            return self._layers.norm(norm, projection)
        apart = writer.node("Reshape", [projection, writer.constant([0, 0, -1, spec.head_dim])], f"{norm}.heads")
        return writer.node("Reshape", [self._layers.norm(norm, apart), writer.constant([0, 0, -1])], f"{norm}.joined")

    def _rotary_tables(self, index: int) -> RotaryTables | None:
        """Tables [positions, pairs], made in the arithmetic of transformers; None where a block has no positions.

        Blocks that rotate alike share theirs.
        """
        if self._spec.attentions[index].rope is None:
            return None
        frequencies, factor = rope_frequencies(self._model.config, index)
        key = tuple(frequencies), factor
        if key not in self._tables:
            number = len(self._tables)
            positions = torch.arange(context_length(self._spec), dtype=torch.float32)
            angles = torch.outer(positions, torch.tensor(frequencies, dtype=torch.float32))
            cos, sin = ((table * factor).numpy() for table in (angles.cos(), angles.sin()))
            names = [self._writer.floats(f"rotary.{number}.{kind}", t) for kind, t in (("cos", cos), ("sin", sin))]
            self._tables[key] = RotaryTables(names[0], names[1], len(frequencies))
        return self._tables[key]

    def _rotates_inside(self, tables: RotaryTables) -> bool:
        return self._spec.head_dim % ROTATED_MULTIPLE == 0 and 2 * tables.pairs % ROTATED_MULTIPLE == 0

    def _rotate(self, projection: str, width: int, tables: RotaryTables) -> str:
        """Rotary positions on [batch, sequence, heads * head_dim]."""
        spec = self._spec
        partial = 2 * tables.pairs != spec.head_dim
        return self._writer.node(
            "RotaryEmbedding",
            [projection, self._position_ids(), tables.cos, tables.sin],
            f"{projection}.rotated",
            domain=MICROSOFT,
            # The operator wants both or none: it reads whole heads' size from the tables.
            num_heads=width // spec.head_dim if partial else 0,
            rotary_embedding_dim=2 * tables.pairs if partial else 0,
        )

    def _position_ids(self) -> str:
        """int64 [batch, sequence]: tokens of the row before each new one. Made once, when first asked for."""
        if self._positions is None:
            writer = self._writer
            if not self._padding:
                whole_rows(writer, "input_ids")
            before = writer.node("Sub", ["token_count", "query_seqlens"], "tokens_before")
            wide = writer.node("Cast", [before], "tokens_before_long", to=INT64)
            column = writer.node("Unsqueeze", [wide, writer.constant([1])], "tokens_before_column")
            scalar = writer.node("Squeeze", ["sequence_length"], "sequence_length_scalar")
            steps = writer.node("Range", [writer.constant(0), scalar, writer.constant(1)], "steps")
            self._positions = writer.node("Add", [column, steps], "position_ids")
        return self._positions
