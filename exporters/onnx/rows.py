"""Rows of a batch without padding: GroupQueryAttention wants the new tokens of a row at its start.

It keeps each row of its cache without gaps, too. Only attention looks at other tokens, so columns are moved before the
embedding, and moved back before the head: padding may lie anywhere, and no mask slows attention down.
"""

from __future__ import annotations

import numpy as np

from exporters.onnx.writer import INT32, GraphWriter

TO_THE_END = 2**63 - 1


def count_tokens(writer: GraphWriter, attention_mask: str) -> str:
    """int32 [batch, past + sequence]: the mask, which has 1 for a token and 0 for padding.

    Makes values that attention reads, int32: ``seqlens_k`` [batch], each row's tokens less one; and
    ``total_sequence_length`` [1], the mask's width.
    """
    mask = writer.node("Cast", [attention_mask], "mask", to=INT32)
    tokens = writer.node("ReduceSum", [mask, writer.constant([1])], "token_count", keepdims=0)
    writer.node("Sub", [tokens, writer.tensor("one", np.array(1, dtype=np.int32))], "seqlens_k")
    width = writer.node("Shape", [attention_mask], "mask_width", start=1, end=2)
    writer.node("Cast", [width], "total_sequence_length", to=INT32)
    return mask


def pack_rows(writer: GraphWriter, input_ids: str, mask: str) -> str:
    """int64 [batch, sequence]: the new tokens of each row in their order, then what is padding.

    ``mask`` as :func:`count_tokens` returns it. Makes ``sequence_length`` int64 [1], the columns, and ``query_seqlens``
    int32 [batch], the tokens that are new.
    """
    writer.node("Shape", [input_ids], "sequence_length", start=1, end=2)
    columns = writer.constant([1])
    start = writer.node("Neg", ["sequence_length"], "first_new_column")
    new = writer.node("Slice", [mask, start, writer.constant([TO_THE_END]), columns], "new_mask")
    writer.node("ReduceSum", [new, columns], "query_seqlens", keepdims=0)
    # Equal entries stay in their order: TopK takes the lower index first.
    outputs = ["packed_mask", "packed_columns"]
    writer.node("TopK", [new, "sequence_length"], "packed_mask", outputs=outputs, axis=1)
    return writer.node("GatherElements", [input_ids, "packed_columns"], "packed_ids", axis=1)


def whole_rows(writer: GraphWriter, input_ids: str) -> None:
    """Make what :func:`pack_rows` makes, where every column is a token."""
    length = writer.node("Shape", [input_ids], "sequence_length", start=1, end=2)
    writer.node("Cast", [length], "query_seqlens", to=INT32)


def unpack_rows(writer: GraphWriter, hidden: str) -> str:
    """``hidden`` [batch, sequence, hidden] with everything back in its column: where each is, sorting tells."""
    outputs = ["sorted_columns", "packed_column"]
    writer.node("TopK", ["packed_columns", "sequence_length"], "sorted_columns", outputs=outputs, axis=1, largest=0)
    indices = writer.node("Unsqueeze", ["packed_column", writer.constant([2])], "packed_indices")
    return writer.node("GatherND", [hidden, indices], "unpacked", batch_dims=1)
