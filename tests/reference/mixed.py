"""Mixed precision the long way: gradients of the whole model at once, and every plan there is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

INFINITY = float("inf")


def fisher(folder: Path, tokens: Tensor, layers: Sequence[str], seed: int) -> dict[str, Tensor]:
    """layer -> diagonal Fisher information per token, float64 [out, in], of int64 ``tokens`` [windows, length].

    For each window: tokens drawn from the model's own predictions, the gradient of the sum of their -log p, squared.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parameters = {layer: model.get_parameter(f"{layer}.weight") for layer in layers}
    generator = torch.Generator().manual_seed(seed)
    squares = {layer: torch.zeros(weight.shape, dtype=torch.float64) for layer, weight in parameters.items()}
    for window in tokens:
        log_p = torch.log_softmax(model(window[None]).logits[0], -1)
        drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
        model.zero_grad()
        (-log_p.gather(1, drawn).sum()).backward()  # type: ignore[no-untyped-call]
        for layer, weight in parameters.items():
            assert weight.grad is not None
            squares[layer] += weight.grad.double().square()
    return {layer: square / tokens.numel() for layer, square in squares.items()}


def best_plan(loss: Sequence[Sequence[float]], bits: Sequence[Sequence[int]], budget: int) -> tuple[float, int]:
    """(least total loss, bits of that plan) over every plan within ``budget``; infinite loss if there is none."""
    best = (INFINITY, 0)
    for plan in itertools.product(*(range(len(row)) for row in loss)):
        total = sum(row[choice] for row, choice in zip(bits, plan, strict=True))
        if total <= budget:
            best = min(best, (sum(row[choice] for row, choice in zip(loss, plan, strict=True)), total))
    return best
