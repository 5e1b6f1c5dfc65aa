"""StreamingLLM token by token: keys are kept as they were before their positions, which are given anew at each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def logits_of(model: Any, tokens: list[int], pieces: list[int], window: int, sinks: int, step: int) -> Tensor:
    """Logits [tokens, vocab] of a transformers llama (or smollm3) that is fed ``pieces`` tokens at a time.

    Before a piece the ``step`` oldest of the window go until it fits beside ``sinks`` + ``window`` tokens.
    """
    body, head = model.model, model.lm_head
    caches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in body.layers]
    found, done = [], 0
    for length in pieces:
        for cache in caches:
            while len(cache) + length > sinks + window:
                del cache[sinks : sinks + step]
        for token in tokens[done : done + length]:
            hidden = body.embed_tokens(torch.tensor([token]))
            for index, layer in enumerate(body.layers):
                normed = layer.input_layernorm(hidden)
                hidden = hidden + _attend(model, index, normed, caches[index])
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            found.append(head(body.norm(hidden))[0])
        done += length
    return torch.stack(found)


def _attend(model: Any, index: int, hidden: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of one token [1, hidden] over ``cache``, to which it is appended."""
    layer = model.model.layers[index].self_attn
    size = layer.head_dim
    query, key, value = (getattr(layer, f"{role}_proj")(hidden).view(-1, size) for role in ("q", "k", "v"))
    cache.append((key, value))
    positions = torch.arange(len(cache))[None]
    cos, sin = model.model.rotary_emb(hidden, positions)
    if not getattr(layer, "use_rope", True):
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    keys = torch.stack([_turn(kept, cos[0, at], sin[0, at]) for at, (kept, _) in enumerate(cache)])
    values = torch.stack([kept for _, kept in cache])
    query = _turn(query, cos[0, -1], sin[0, -1])
    group = len(query) // keys.shape[1]
    mixed = []
    for head, row in enumerate(query):
        scores = keys[:, head // group] @ row * layer.scaling
        mixed.append(torch.softmax(scores, 0) @ values[:, head // group])
    out: Tensor = layer.o_proj(torch.cat(mixed)[None])
    return out


def _turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin
