"""H2O, SnapKV and StreamingLLM with a cache that really loses its entries: one head, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.eviction import OBSERVED, POOLED, SINKS


def attend(query: Tensor, key: Tensor, value: Tensor, method: str, prompt: int, kept: int) -> Tensor:
    """Attention [heads, length, size] of one key/value head: ``query`` [heads, length, size], scaled."""
    cache: list[int] = []
    observed = min(OBSERVED, kept // 2, prompt)
    sums: dict[int, float] = {}
    rows = []
    for token in range(query.shape[1]):
        cache.append(token)
        sums[token] = 0.0
        mixed = []
        for head in range(len(query)):
            scores = torch.stack([query[head, token] @ key[other] for other in cache])
            share = torch.softmax(scores, 0)
            mixed.append(sum(part * value[other] for part, other in zip(share, cache, strict=True)))
            if method != "snapkv" or prompt - observed <= token < prompt:
                for part, other in zip(share.tolist(), cache, strict=True):
                    sums[other] += part
        rows.append(torch.stack([torch.as_tensor(row) for row in mixed]))
        if token == prompt - 1:
            cache = _after_prompt(method, cache, sums, kept, observed)
        elif token >= prompt and method != "snapkv" and len(cache) > kept:
            cache.remove(_least(method, cache, sums, kept))
    return torch.stack(rows, 1)


def _after_prompt(method: str, cache: list[int], sums: dict[int, float], kept: int, observed: int) -> list[int]:
    if method == "snapkv":
        before, last = cache[: len(cache) - observed], cache[len(cache) - observed :]
        # Each with its neighbours; beyond the ends there is nothing.
        near = POOLED // 2
        pooled = {
            token: sum(sums[other] for other in before if abs(other - token) <= near) / POOLED for token in before
        }
        best = sorted(before, key=lambda token: -pooled[token])[: kept - observed]
        return sorted(best) + last
    while len(cache) > kept:
        cache.remove(_least(method, cache, sums, kept))
    return cache


def _least(method: str, cache: list[int], sums: dict[int, float], kept: int) -> int:
    if method == "streaming":
        return next(token for token in cache if token >= SINKS)
    newest = max(cache)
    return min((token for token in cache if token <= newest - kept // 2), key=lambda token: sums[token])
