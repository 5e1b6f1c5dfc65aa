"""A model run block by block computes what transformers computes, and holds one block at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import InputError
from compress.models.checkpoint import open_checkpoint
from compress.models.decoder import TOKENS_PER_FORWARD, Decoder
from tests.support import tiny_llama

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one key head": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3 rotary": {"rope_parameters": LLAMA3_ROPE},
    "linear rotary": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "wide heads": {"head_dim": 24},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16, tied": {"dtype": torch.float16, "tie_word_embeddings": True},
    "one block": {"num_hidden_layers": 1},
    "five blocks, gelu": {"num_hidden_layers": 5, "hidden_act": "gelu"},
}


def shaken(parameters: dict[str, Tensor]) -> None:
    """Norm weights and biases that are not the trivial ones of a fresh model."""
    for parameter in parameters.values():
        if parameter.ndim == 1:
            parameter.add_(0.3 * torch.randn(parameter.shape).to(parameter.dtype))


def whole_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tokens_of(windows: int, length: int) -> Tensor:
    return torch.randint(0, 281, (windows, length), generator=torch.Generator().manual_seed(windows * length))


def embed(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    hidden = torch.empty(*tokens.shape, decoder.spec.hidden_size)
    decoder.embed_into(tokens, hidden)
    return hidden


def run_on_all(decoder: Decoder, index: int, module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    leaving = torch.empty_like(hidden)
    decoder.run_block_into(index, module, hidden, leaving)
    return leaving


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    folder = tiny_llama(tmp_path / "model", edit=shaken, **VARIANTS[variant])
    tokens = tokens_of(3, 70)
    with torch.no_grad():
        expected = whole_model(folder)(tokens).logits
    found = torch.stack(list(Decoder(open_checkpoint(folder)).logits(tokens)))
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_a_sharded_checkpoint_gives_the_same_logits(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", edit=shaken)
    whole_model(folder).save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    checkpoint = open_checkpoint(tmp_path / "shards")
    assert len(set(checkpoint.files.values())) > 3
    tokens = tokens_of(2, 20)
    one, other = (torch.stack(list(Decoder(c).logits(tokens))) for c in (open_checkpoint(folder), checkpoint))
    assert torch.equal(one, other)


def test_many_windows_in_several_forwards_are_each_computed(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", num_hidden_layers=1)
    tokens = tokens_of(2 * TOKENS_PER_FORWARD // 100 + 3, 100)
    decoder = Decoder(open_checkpoint(folder))
    found = list(decoder.logits(tokens))
    assert len(found) == len(tokens)
    with torch.no_grad():
        model = whole_model(folder)
        for index in (0, TOKENS_PER_FORWARD // 100 - 1, TOKENS_PER_FORWARD // 100, len(tokens) - 1):
            torch.testing.assert_close(found[index], model(tokens[index : index + 1]).logits[0], rtol=1e-4, atol=1e-4)


def in_memory(decoder: Decoder) -> set[str]:
    """Parameters that hold numbers now."""
    return {name for name, parameter in decoder._model.named_parameters() if not parameter.is_meta}


@pytest.mark.parametrize("tied", [True, False])
def test_only_what_a_context_promises_is_in_memory(tmp_path: Path, tied: bool) -> None:
    decoder = Decoder(open_checkpoint(tiny_llama(tmp_path / "model", tie_word_embeddings=tied)))
    assert in_memory(decoder) == set()
    hidden = embed(decoder, tokens_of(2, 16))
    assert in_memory(decoder) == set()
    with decoder.block(1) as module:
        assert {name.split(".")[2] for name in in_memory(decoder)} == {"1"}
        hidden = run_on_all(decoder, 1, module, hidden)
        assert not any(parameter.requires_grad for parameter in module.parameters())
    assert in_memory(decoder) == set()
    with decoder.head() as head:
        head(hidden)
        assert not any(name.startswith("model.layers") for name in in_memory(decoder))
    list(decoder.head_inputs(hidden))
    list(decoder.logits(tokens_of(1, 16)))
    assert in_memory(decoder) == set()


def test_contexts_clean_up_after_an_error(tmp_path: Path) -> None:
    decoder = Decoder(open_checkpoint(tiny_llama(tmp_path / "model")))
    tokens = tokens_of(1, 16)
    expected = next(decoder.logits(tokens))
    with pytest.raises(RuntimeError, match="stop"), decoder.block(0):
        raise RuntimeError("stop")
    with pytest.raises(RuntimeError, match="stop"), decoder.head():
        raise RuntimeError("stop")
    assert in_memory(decoder) == set()
    assert torch.equal(next(decoder.logits(tokens)), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_fed_what_it_is_fed_in_the_whole_model(tmp_path: Path, tied: bool) -> None:
    folder = tiny_llama(tmp_path / "model", edit=shaken, tie_word_embeddings=tied)
    tokens = tokens_of(3, 40)
    model, seen = whole_model(folder), []
    model.lm_head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model(tokens)
    decoder = Decoder(open_checkpoint(folder))
    hidden = embed(decoder, tokens)
    for index in range(decoder.spec.layers):
        with decoder.block(index) as module:
            hidden = run_on_all(decoder, index, module, hidden)
    torch.testing.assert_close(torch.cat(list(decoder.head_inputs(hidden))), seen[0], rtol=1e-5, atol=1e-5)


def test_replaced_weights_are_those_that_compute(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model")
    checkpoint, tokens = open_checkpoint(folder), tokens_of(2, 24)
    model = whole_model(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("down_proj.weight", "lm_head.weight")):
                parameter.mul_(0.5)
        expected = model(tokens).logits

    def read(name: str) -> Tensor:
        return checkpoint.tensor(name) * (0.5 if name.endswith(("down_proj.weight", "lm_head.weight")) else 1.0)

    found = torch.stack(list(Decoder(checkpoint, read).logits(tokens)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_block_takes_given_tensors_instead_of_its_own(tmp_path: Path) -> None:
    decoder = Decoder(open_checkpoint(tiny_llama(tmp_path / "model")))
    hidden = embed(decoder, tokens_of(1, 12))
    silent = {name: torch.zeros_like(tensor) for name, tensor in decoder.block_tensors(0).items()}
    with decoder.block(0, silent) as module:
        assert torch.equal(run_on_all(decoder, 0, module, hidden), hidden)
    with decoder.block(0) as module:
        assert not torch.equal(run_on_all(decoder, 0, module, hidden), hidden)


def test_windows_of_another_length_are_refused(tmp_path: Path) -> None:
    decoder = Decoder(open_checkpoint(tiny_llama(tmp_path / "model")))
    hidden = embed(decoder, tokens_of(1, 12))
    with decoder.block(0) as module, pytest.raises(ValueError, match="windows of 12 tokens, not 8"):
        decoder.run_block(0, module, hidden[:, :8])


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "narrower": (
        lambda c: c.update(intermediate_size=128),
        r"mlp\.gate_proj\.weight: \[96, 64\] in the file, \[128, 64\]",
    ),
    "fewer blocks": (lambda c: c.update(num_hidden_layers=1), r"layers\.1\..*config.json knows no such tensor"),
    "more blocks": (lambda c: c.update(num_hidden_layers=3), r"layers\.2\.self_attn\.q_proj\.weight: missing"),
    "biases": (lambda c: c.update(attention_bias=True), r"layers\.1\.self_attn\.o_proj\.bias: missing"),
    "smaller vocabulary": (lambda c: c.update(vocab_size=100), r"embed_tokens\.weight: \[320, 64\] in the file"),
    "tied, though the head differs": (lambda c: c.update(tie_word_embeddings=True), r"lm_head\.weight: .*it differs"),
    "unknown activation": (lambda c: c.update(hidden_act="foo"), "transformers cannot use .*'foo'"),
    "text for a number": (lambda c: c.update(hidden_size="64"), "transformers cannot use .*'hidden_size' expected int"),
    "heads that do not fit": (lambda c: c.update(num_attention_heads=3), "transformers cannot use .*multiple"),
    "no blocks": (lambda c: c.update(num_hidden_layers=0), "num_hidden_layers is 0"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_config_that_does_not_fit_the_weights_is_refused_at_once(tmp_path: Path, change: str) -> None:
    import json

    folder = tiny_llama(tmp_path / "model")
    edit, message = CHANGES[change]
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=rf"(?s){message}") as caught:
        Decoder(open_checkpoint(folder))
    assert str(folder) in str(caught.value)


def test_a_tied_head_that_is_stored_too_is_fine_when_equal(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_llama(tmp_path / "model", tie_word_embeddings=True)
    tokens = tokens_of(1, 12)
    expected = next(Decoder(open_checkpoint(folder)).logits(tokens))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(next(Decoder(open_checkpoint(folder)).logits(tokens)), expected)
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="tie_word_embeddings"):
        Decoder(open_checkpoint(folder))


def test_blocks_multiply_in_bfloat16_only_where_all_windows_go_through_them_and_if_asked(tmp_path: Path) -> None:
    checkpoint, tokens = open_checkpoint(tiny_llama(tmp_path / "model")), tokens_of(3, 24)
    exact, lower = Decoder(checkpoint), Decoder(checkpoint, precision="bfloat16")
    hidden = embed(exact, tokens)
    assert torch.equal(embed(lower, tokens), hidden)
    with exact.block(0) as module:
        wanted = run_on_all(exact, 0, module, hidden)
    with lower.block(0) as module:
        found = run_on_all(lower, 0, module, hidden)
        assert torch.equal(lower.run_block(0, module, hidden), wanted)
    assert found.dtype == torch.float32
    error = float((found - wanted).norm() / (wanted - hidden).norm())
    assert 1e-4 < error < 2e-2
    assert all(parameter.is_meta for parameter in module.parameters())
