"""What a model loses when its key/value cache keeps only some of the prompt: a torch evaluation, nothing that ships.

Methods, each with positions as they were: ``h2o`` (Zhang et al. 2023, "H2O", alg. 1): half of what is kept are the last
tokens, half those with the largest sums of attention; at each new token the least of the latter goes. ``snapkv`` (Li et
al. 2024, "SnapKV", listing 1): when the prompt ends, what its last tokens attend to most is kept, with them; nothing
goes later. ``streaming`` (Xiao et al. 2024): the first tokens and the last ones. Key/value heads choose for themselves;
the query heads that share one vote together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

Method = Literal["h2o", "snapkv", "streaming"]
METHODS: tuple[Method, ...] = get_args(Method)

SINKS = 4
"""First tokens that ``streaming`` keeps."""
OBSERVED, POOLED = 32, 5
"""Last tokens of the prompt that vote in ``snapkv``, and neighbours whose votes are averaged."""
_ROWS = 256
"""Queries of a prompt at a time: their weights over a long prompt are large."""
_NAME = "edgepress_evicting"


@dataclass(frozen=True)
class Eviction:
    """``method`` with a cache of ``kept`` tokens once the first ``prompt`` tokens are read; ValueError for too few."""

    method: Method
    prompt: int
    kept: int

    def __post_init__(self) -> None:
        least = {"h2o": 2, "snapkv": 2, "streaming": SINKS + 1}[self.method]
        if self.prompt < 1 or self.kept < least:
            raise ValueError(f"{self.method} needs a prompt and at least {least} kept tokens, not {self.kept}")

    @property
    def observed(self) -> int:
        """Last tokens of the prompt that vote in ``snapkv``; no more than half of what is kept, since they stay."""
        return min(OBSERVED, self.kept // 2, self.prompt)


@contextmanager
def evicting(model: Any, eviction: Eviction) -> Iterator[None]:
    """The transformers ``model`` with ``eviction`` in every block while the context lasts; windows go in whole."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **extra: Any
    ) -> tuple[Tensor, None]:
        out = attend(query * scaling, key, value, eviction, mask, extra.get("softcap"))
        return out.transpose(1, 2).contiguous(), None

    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, eager_mask)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def attend(
    query: Tensor, key: Tensor, value: Tensor, eviction: Eviction, mask: Tensor | None = None, cap: float | None = None
) -> Tensor:
    """Attention [batch, heads, length, size] where tokens behind the prompt see what is left in the cache.

    ``query`` float32 [batch, heads, length, size], scaled; ``key``, ``value`` [batch, kv heads, length, size]; ``mask``
    [batch or 1, 1, length, length], added to the scores, or None for all that came before.
    """
    batch, heads, length, size = query.shape
    groups, prompt = key.shape[1], min(eviction.prompt, length)
    query = query.view(batch, groups, heads // groups, length, size)
    out, votes = torch.empty_like(query), torch.zeros(batch, groups, length)

    def weights(first: int, last: int, seen: Tensor | None = None) -> Tensor:
        """Of queries first..last over the tokens before ``last``: [batch, kv heads, heads of each, rows, tokens]."""
        scores = query[..., first:last, :] @ key[:, :, None, :last].transpose(-1, -2)
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        if mask is not None:
            scores = scores + mask[:, :, None, first:last, :last]
        else:
            scores = scores.masked_fill(torch.ones(last - first, last).triu(first + 1).bool(), -torch.inf)
        if seen is not None:
            scores = scores.masked_fill(~seen[:, :, None, None, :last], -torch.inf)
        return torch.softmax(scores, -1)

    for first in range(0, prompt, _ROWS):
        last = min(first + _ROWS, prompt)
        given = weights(first, last)
        out[..., first:last, :] = given @ value[:, :, None, :last]
        # Only the last tokens of the prompt vote in snapkv.
        voting = max(0, prompt - eviction.observed - first) if eviction.method == "snapkv" else 0
        votes[..., :last] += given[:, :, :, voting:].sum((2, 3))
    seen = torch.zeros(batch, groups, length, dtype=torch.bool)
    price = _PRICES[eviction.method](votes[..., :prompt], eviction)
    seen.scatter_(-1, price.topk(min(eviction.kept, prompt), dim=-1).indices, True)
    for token in range(prompt, length):
        seen[..., token] = True
        given = weights(token, token + 1, seen)
        out[..., token : token + 1, :] = given @ value[:, :, None, : token + 1]
        votes[..., : token + 1] += given.sum((2, 3))
        if eviction.method != "snapkv" and token >= eviction.kept:
            price = _PRICES[eviction.method](votes[..., : token + 1], eviction)
            least = price.masked_fill(~seen[..., : token + 1], torch.inf).argmin(-1, keepdim=True)
            seen.scatter_(-1, least, False)
    return out.view(batch, heads, length, size)


def _heavy(votes: Tensor, eviction: Eviction) -> Tensor:
    price = votes.clone()
    price[..., max(0, votes.shape[-1] - eviction.kept // 2) :] = torch.inf
    return price


def _observed(votes: Tensor, eviction: Eviction) -> Tensor:
    price = torch.full_like(votes, torch.inf)
    before = votes[..., : votes.shape[-1] - eviction.observed]
    if before.shape[-1]:
        price[..., : before.shape[-1]] = avg_pool1d(before, POOLED, stride=1, padding=POOLED // 2)
    return price


def _first_and_last(votes: Tensor, eviction: Eviction) -> Tensor:
    price = torch.arange(votes.shape[-1], dtype=votes.dtype).expand_as(votes).clone()
    price[..., :SINKS] = torch.inf
    return price


_PRICES: Mapping[Method, Any] = MappingProxyType({"h2o": _heavy, "snapkv": _observed, "streaming": _first_and_last})
"""Method -> from the sums of attention [batch, kv heads, tokens], what each token is worth; the least goes first."""
