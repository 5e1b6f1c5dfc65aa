"""Eviction from the cache by masks: the same as a cache that loses entries, head by head and token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.eviction import METHODS, SINKS, Eviction, Method, attend, evicting
from tests.compress.families import VARIANTS, saved, tokens_of, whole_model
from tests.reference import eviction as reference

pytestmark = pytest.mark.usefixtures("one_thread")


def drawn(length: int, heads: int = 4, groups: int = 2, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((2, heads, length, size), (2, groups, length, size), (2, groups, length, size))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    # Some tokens draw attention from everywhere, so that methods differ.
    key[:, :, ::7] += query.mean((1, 2), keepdim=True) * 3
    return query, key, value


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("prompt", "kept"), [(40, 12), (60, 40), (5, 10), (48, 48), (1, 7)])
def test_masks_are_a_cache_that_loses_entries(method: Method, prompt: int, kept: int) -> None:
    query, key, value = drawn(70)
    found = attend(query, key, value, Eviction(method, prompt, kept))
    for batch in range(2):
        for group in range(2):
            heads = slice(2 * group, 2 * group + 2)
            wanted = reference.attend(query[batch, heads], key[batch, group], value[batch, group], method, prompt, kept)
            torch.testing.assert_close(found[batch, heads], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_longer_than_the_pieces_votes_as_a_whole(method: Method) -> None:
    query, key, value = drawn(300, heads=2, groups=1)
    found = attend(query, key, value, Eviction(method, 290, 60))
    wanted = reference.attend(query[0], key[0, 0], value[0, 0], method, 290, 60)
    torch.testing.assert_close(found[0], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["llama", "gemma2", "qwen2 with a window", "smollm3"])
def test_with_room_for_everything_nothing_changes(variant: str, tmp_path: Path) -> None:
    assert variant in VARIANTS
    model, tokens = whole_model(saved(variant, tmp_path)), tokens_of(2, 40)
    with torch.no_grad():
        whole = model(tokens).logits
        for method in METHODS:
            with evicting(model, Eviction(method, 30, 40)):
                torch.testing.assert_close(model(tokens).logits, whole, atol=1e-4, rtol=1e-4)
            with evicting(model, Eviction(method, 30, 6)):
                less = model(tokens).logits
            torch.testing.assert_close(less[:, :30], whole[:, :30], atol=1e-4, rtol=1e-4)
            assert (less[:, 30:] - whole[:, 30:]).abs().max() > 1e-2
        assert torch.equal(model(tokens).logits, whole)


def test_what_is_attended_to_is_kept_where_it_is_not_recent() -> None:
    query, key, value = drawn(64, heads=2, groups=1)
    query[..., 0], key[:, :, 20, 0] = 3, 3
    value.zero_()
    value[:, :, 20] = 1
    kept = {method: attend(query, key, value, Eviction(method, 60, 8))[:, :, 60:].mean() for method in METHODS}
    assert kept["streaming"] == 0
    assert min(kept["h2o"], kept["snapkv"]) > 0.1


def test_too_few_tokens_are_refused() -> None:
    for method, least in (("h2o", 2), ("snapkv", 2), ("streaming", SINKS + 1)):
        with pytest.raises(ValueError, match=f"at least {least} kept tokens"):
            Eviction(method, 8, least - 1)
    with pytest.raises(ValueError, match="needs a prompt"):
        Eviction("h2o", 0, 8)
