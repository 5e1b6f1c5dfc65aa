"""SentencePiece-style BPE: llama.cpp merges by the score of the merged piece, ``tokenizer.json`` by ranked pairs.

Both give the same tokens when every way to split a piece into two known pieces is a listed merge, and the merges of
one piece follow each other: the case for vocabularies converted from SentencePiece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

SPACE = "▁"
_NEVER_MERGED = -1e9
Merge = str | Sequence[str]


def _pairs(merges: Sequence[Merge]) -> Iterator[tuple[str, str]]:
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def piece_scores(tokens: Sequence[str], merges: Sequence[Merge]) -> list[float]:
    """Score of each token: minus the rank of the first merge that makes it; very low for what no merge makes."""
    rank: dict[str, int] = {}
    for left, right in _pairs(merges):
        rank.setdefault(left + right, len(rank))
    return [-float(rank[token]) if token in rank else _NEVER_MERGED for token in tokens]


def merge_remarks(merges: Sequence[Merge], pieces: set[str]) -> list[str]:
    """What makes merging by piece differ from merging by pair, if anything does."""
    listed = list(_pairs(merges))
    known = set(listed)
    made = [left + right for left, right in listed]
    splits = ((piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece)))
    missing = sum(left in pieces and right in pieces and (left, right) not in known for left, right in splits)
    scattered = 1 + sum(a != b for a, b in pairwise(made)) - len(set(made)) if made else 0
    if not missing and not scattered:
        return []
    return [
        f"this is no SentencePiece vocabulary ({missing} ways to join two pieces are not merges, {scattered} pieces "
        "have merges at several ranks), so llama.cpp may split some words otherwise"
    ]
