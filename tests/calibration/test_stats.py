"""Statistics of layer inputs: every token once, in whatever pieces it comes, and no hook left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from calibration.stats import InputStats, collect_inputs


def test_gram_hessian_and_importance_are_sums_over_tokens() -> None:
    inputs = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(0))
    stats = InputStats(6)
    stats.update(inputs)
    flat = inputs.reshape(-1, 6).double()
    gram = sum((torch.outer(token, token) for token in flat), torch.zeros(6, 6, dtype=torch.float64))
    assert stats.tokens == 35
    torch.testing.assert_close(stats.gram.double(), gram, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.hessian.double(), 2 * gram / 35, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stats.importance.double(), flat.square().mean(0), rtol=1e-5, atol=1e-6)
    assert stats.gram.dtype == torch.float32


@pytest.mark.parametrize("piece", [1, 3, 64])
def test_the_size_of_the_batches_does_not_matter(piece: int) -> None:
    inputs = torch.randn(64, 10, 16, generator=torch.Generator().manual_seed(1))
    whole, pieces = InputStats(16), InputStats(16)
    whole.update(inputs)
    for part in torch.split(inputs, piece):
        pieces.update(part)
    assert pieces.tokens == whole.tokens == 640
    torch.testing.assert_close(pieces.gram, whole.gram, rtol=1e-5, atol=1e-3)


def test_low_precision_inputs_are_summed_in_float32() -> None:
    inputs = torch.full((4096, 3), 0.1, dtype=torch.bfloat16)
    stats = InputStats(3)
    for part in torch.split(inputs, 64):
        stats.update(part)
    expected = 4096 * float(inputs[0, 0]) ** 2
    torch.testing.assert_close(stats.gram, torch.full((3, 3), expected), rtol=1e-4, atol=0)


def test_no_token_at_all_is_zero_not_a_division_by_zero() -> None:
    stats = InputStats(4)
    assert torch.equal(stats.hessian, torch.zeros(4, 4))
    assert torch.equal(stats.importance, torch.zeros(4))


class Pair(nn.Module):
    """Two layers on one input, and a third on the sum of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.o(self.q(inputs) + self.k(inputs))
        return out


def test_layers_on_one_input_share_one_object_filled_once() -> None:
    torch.manual_seed(0)
    module = Pair()
    layers = {"q": module.q, "k": module.k, "o": module.o}
    inputs = torch.randn(3, 5, 6)
    with torch.no_grad(), collect_inputs(layers, [["q", "k"], ["o"]]) as found:
        module(inputs[:2])
        module(inputs[2:])
    assert found["q"] is found["k"]
    assert found["o"] is not found["q"]
    assert {name: stats.tokens for name, stats in found.items()} == {"q": 15, "k": 15, "o": 15}
    flat = inputs.reshape(-1, 6)
    torch.testing.assert_close(found["q"].gram, flat.T @ flat)
    fed = (module.q(inputs) + module.k(inputs)).detach().reshape(-1, 4)
    torch.testing.assert_close(found["o"].gram, fed.T @ fed)


def test_hooks_go_when_the_context_ends_well_or_not() -> None:
    module = Pair()
    layers = {"q": module.q, "k": module.k, "o": module.o}
    with collect_inputs(layers, [["q", "k"], ["o"]]) as found:
        module(torch.randn(2, 6))
    module(torch.randn(2, 6))
    assert found["q"].tokens == 2
    with pytest.raises(RuntimeError, match="stop"), collect_inputs(layers, [["q", "k"], ["o"]]):
        raise RuntimeError("stop")
    assert not any(layer._forward_pre_hooks for layer in layers.values())
