"""Routed experts: each projection of each expert is a layer, calibrated on its own tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from compress.errors import InputError
from compress.findings import describe_model, pass_warnings
from compress.grid import output_error, round_to_nearest
from compress.models.checkpoint import open_checkpoint
from compress.models.decoder import Decoder
from compress.models.topology import describe
from compress.passes.gptq import Gptq, is_rare
from compress.passes.mixed import Mixed
from compress.passes.rotate import Rotate
from compress.passes.rtn import Rtn
from compress.prepare import Prepared
from compress.recipe import Recipe
from compress.report import LayerRecord, PassRecord
from compress.scheme import INT8_G32, QuantScheme
from tests.compress.families import (
    ROUTED,
    Watch,
    blockwise,
    compressed,
    largest_difference,
    logits,
    random_model,
    saved,
    tokens_of,
    whole_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")
every_routed = pytest.mark.parametrize("variant", ROUTED)


def naive_expert_inputs(folder: Path, tokens: Tensor, index: int) -> dict[str, list[Tensor]]:
    """Layer -> the inputs of its tokens, in order, from the whole model and a loop over tokens and experts."""
    model, kept = whole_model(folder), []
    model.model.layers[index].mlp.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    logits(model, tokens)
    checkpoint = open_checkpoint(folder)
    spec = describe(checkpoint.config)
    assert spec.experts is not None
    router = next(name for name in spec.float_linears() if f"layers.{index}." in name)
    found: dict[str, list[Tensor]] = {name: [] for expert in spec.expert_linears(index) for name in expert.values()}
    for token in kept[0].reshape(-1, spec.hidden_size):
        chances = checkpoint.tensor(f"{router}.weight") @ token
        for expert in chances.topk(spec.experts.per_token).indices.tolist():
            names = spec.expert_linears(index)[expert]
            gate, up = (checkpoint.tensor(f"{names[role]}.weight") @ token for role in ("gate", "up"))
            found[names["gate"]].append(token)
            found[names["up"]].append(token)
            found[names["down"]].append(silu(gate) * up)
    return found


@every_routed
def test_statistics_of_an_expert_are_those_of_its_own_tokens(variant: str, tmp_path: Path) -> None:
    folder, tokens, watch = saved(variant, tmp_path / "model"), tokens_of(3, 40), Watch()
    found = compressed(folder, tmp_path / "work", [watch], tokens)
    spec = found.session.decoder.spec
    assert spec.experts is not None
    index = max(spec.experts.blocks)
    for layer, inputs in naive_expert_inputs(folder, tokens, index).items():
        stats = watch.seen[layer]
        assert stats.routed
        assert stats.tokens == len(inputs)
        expected = sum((torch.outer(x, x) for x in inputs), torch.zeros_like(stats.gram))
        torch.testing.assert_close(stats.gram, expected, rtol=1e-4, atol=1e-4)
    for block in spec.experts.blocks:
        experts = spec.expert_linears(block)
        assert all(watch.seen[names["gate"]] is watch.seen[names["up"]] for names in experts)
        seen = [watch.seen[names["down"]].tokens for names in experts]
        assert sum(seen) == tokens.numel() * spec.experts.per_token
        assert max(seen) < tokens.numel()
    always = [layers[0] for index in range(spec.layers) for layers in spec.shared_inputs(index)]
    assert all(watch.seen[layer].tokens == tokens.numel() and not watch.seen[layer].routed for layer in always)
    assert watch.seen.keys() == {*spec.all_linears(), *spec.ends[1:]}


@every_routed
def test_the_share_of_quantised_weights_is_stated_and_true(variant: str, tmp_path: Path) -> None:
    """O09: experts are quantised, one by one, and what is not is counted and named."""
    folder = saved(variant, tmp_path / "model")
    found = compressed(folder, tmp_path / "work", [Rtn()], tokens_of(1, 8))
    stored = load_file(folder / "model.safetensors")
    changed = {name for name, tensor in stored.items() if not torch.equal(tensor, found.model.parameter(name))}
    left = {name for name, tensor in stored.items() if tensor.ndim == 2} - changed
    spec, step = found.session.decoder.spec, Rtn()
    recipe = Recipe(str(folder), passes=(), export=())
    prepared = Prepared(
        recipe=recipe,
        original=found.checkpoint,
        checkpoint=found.checkpoint,
        rewrites=(),
        spec=spec,
        shapes=found.session.shapes,
        pinned=found.session.pinned,
        passes=(),
        threads=1,
    )
    model = describe_model(prepared, found.model.schemes)
    assert model["parameters"] == sum(p.numel() for p in whole_model(folder).parameters())
    assert model["quantized_weights"] == sum(stored[name].numel() for name in changed)
    assert model["weights"] == sum(tensor.numel() for tensor in stored.values() if tensor.ndim == 2)
    assert model["quantized_share"] == model["quantized_weights"] / model["weights"]
    assert model["quantized_weights"] > 0.97 * model["parameters"]
    assert {f"{name}.weight" for name in model["float_layers"]} == left
    assert all(name.endswith(("gate", "shared_expert_gate")) for name in model["float_layers"])
    experts = sum(stored[name].numel() for name in changed if ".experts." in name)
    assert 0.3 < experts / model["parameters"] < 0.9
    assert {found.model.schemes[layer] for layer in spec.all_linears()} == {step.scheme}


def one_sided(folder: Path) -> Path:
    """O10: a model whose routers never choose the experts 4 and 5."""
    model = random_model("qwen3_moe")
    with torch.no_grad():
        for block in model.model.layers:
            v = torch.randn(64)
            block.mlp.gate.weight.copy_(torch.stack([v, 2 * v, -v, -2 * v, 0 * v, 0 * v]))
    model.save_pretrained(folder)
    return folder


def test_experts_without_tokens_get_the_format_of_the_others_and_are_named(tmp_path: Path) -> None:
    """O10: no missing Hessian, no float leftovers, no mixed formats."""
    folder = one_sided(tmp_path / "model")
    found = compressed(folder, tmp_path / "work", [Gptq()], tokens_of(4, 64))
    spec = found.session.decoder.spec
    assert {str(found.model.schemes[layer]) for layer in spec.all_linears()} == {"int4-g32"}
    records = {record.layer: record for record in found.done[0].layers}
    for index in range(spec.layers):
        for expert, names in enumerate(spec.expert_linears(index)):
            for role, layer in names.items():
                record, columns = records[layer], 48 if role == "down" else 64
                if expert >= 4:
                    assert record.tokens == 0
                    assert record.fallback == f"plain rounding: 0 tokens for {columns} columns"
                else:
                    assert record.tokens > 40
                assert bool(torch.isfinite(found.model.weight(layer)).all())
    warnings = list(pass_warnings([PassRecord("gptq", {}, 0.0, tuple(records.values()))]))
    [warning] = [text for text in warnings if " 0 tokens" in text]
    assert warning.startswith("gptq: plain rounding: 0 tokens for 64 columns (model.layers.0.mlp.experts.4.gate_proj, ")
    assert all(f"layers.{index}.mlp.experts.{expert}.down_proj" in warning for index in (0, 1) for expert in (4, 5))
    assert "experts.3" not in warning
    rounded = compressed(folder, tmp_path / "rounded", [Rtn()], tokens_of(4, 64))
    layer = spec.expert_linears(0)[5]["up"]
    assert torch.equal(found.model.weight(layer), rounded.model.weight(layer))
    assert bool(torch.isfinite(logits(found.replaced(tmp_path / "replaced"), tokens_of(1, 20))).all())


def test_an_expert_with_few_tokens_is_rounded_for_those_tokens(tmp_path: Path) -> None:
    folder, watch, tokens = saved("mixtral", tmp_path / "model"), Watch(), tokens_of(4, 72)
    found = compressed(folder, tmp_path / "work", [Gptq(), watch], tokens)
    experts = {name for expert in found.session.decoder.spec.expert_linears(0) for name in expert.values()}
    rounded = 0
    for record in found.done[0].layers:
        stats = watch.seen.get(record.layer)
        few = stats is not None and record.layer in experts and record.tokens < 2 * len(stats.gram)
        if stats is None or record.layer not in experts:
            continue
        assert few == is_rare(stats) == (record.fallback or "").startswith(f"plain rounding: {record.tokens} tokens")
        if few:
            rounded += 1
            weight = found.checkpoint.tensor(f"{record.layer}.weight")
            expected = round_to_nearest(weight, QuantScheme(4, 32), stats.importance).dequantize()
            assert torch.equal(found.model.weight(record.layer), expected)
            assert record.output_error == output_error(weight, expected, stats.gram)
    assert 0 < rounded < len(experts)


def test_a_warning_about_many_layers_stays_short() -> None:
    layers = [LayerRecord(f"l{n}", "int4-g32", 1, fallback=f"damping raised from 0.01 to {n + 1}") for n in range(99)]
    layers += [LayerRecord("other", "int4-g32", 1, fallback="plain rounding: 0 tokens for 8 columns")]
    many, one = pass_warnings([PassRecord("gptq", {}, 0.0, tuple(layers))])
    assert many.startswith("gptq: damping raised from 0.01 to 1 (l0); damping raised from 0.01 to 2 (l1); ")
    assert many.endswith("(l11), and 87 more")
    assert one == "gptq: plain rounding: 0 tokens for 8 columns (other)"


def test_few_tokens_are_a_reason_to_round_for_experts_alone(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    found = compressed(folder, tmp_path / "work", [Gptq()], tokens_of(1, 20))
    assert not any("tokens for" in str(record.fallback) for record in found.done[0].layers)


@every_routed
def test_a_checkpoint_with_fused_experts_is_read_as_one_with_an_expert_each(variant: str, tmp_path: Path) -> None:
    folder, tokens = saved(variant, tmp_path / "apart"), tokens_of(2, 20)
    random_model(variant).save_pretrained(tmp_path / "fused", save_original_format=False)
    apart, fused = open_checkpoint(folder), open_checkpoint(tmp_path / "fused")
    assert any(name.endswith("gate_up_proj") for name in load_file(tmp_path / "fused/model.safetensors"))
    assert set(apart.files) == set(fused.files)
    assert len(fused.parts) > 10
    for name in apart.files:
        assert torch.equal(apart.tensor(name), fused.tensor(name))
        assert torch.equal(apart.slice(name)[:3], fused.slice(name)[:3])
        assert (apart.shape(name), apart.dtype(name)) == (fused.shape(name), fused.dtype(name))
    expected = blockwise(folder, tokens)
    assert torch.equal(blockwise(tmp_path / "fused", tokens), expected)
    rotated, _ = Rotate().rewrite(fused)
    assert largest_difference(torch.stack(list(Decoder(rotated).logits(tokens))), expected) <= 1e-4


def test_experts_may_lie_in_several_files(tmp_path: Path) -> None:
    folder, tokens = saved("mixtral", tmp_path / "model"), tokens_of(2, 20)
    random_model("mixtral").save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    shards = open_checkpoint(tmp_path / "shards")
    holding = {shards.files[f"{name}.weight"] for name in describe(shards.config).expert_linears(0)[0].values()}
    assert len(set(shards.files.values())) > 4
    assert holding <= set(shards.files.values())
    assert torch.equal(blockwise(folder, tokens), blockwise(tmp_path / "shards", tokens))


def test_a_missing_or_misshapen_expert_is_named(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    narrow = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    tensors[narrow] = tensors[narrow][:50].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"experts\.3\.w2\.weight: missing") as caught:
        Decoder(open_checkpoint(folder))
    assert r"experts.1.w1.weight: [50, 64] in the file, [96, 64] by config.json" in str(caught.value)


def test_bfloat16_experts_compute_in_float32(tmp_path: Path) -> None:
    random_model("qwen2_moe").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokens = tokens_of(2, 20)
    expected = logits(whole_model(tmp_path / "model"), tokens)
    assert largest_difference(blockwise(tmp_path / "model", tokens), expected) <= 1e-4


def test_mixed_precision_chooses_for_each_expert(tmp_path: Path) -> None:
    folder = saved("qwen2_moe", tmp_path / "model")
    found = compressed(folder, tmp_path / "work", [Mixed(target_bits=6.0, samples=2), Rtn()], tokens_of(2, 32))
    spec, bits = found.session.decoder.spec, 0
    for layer in spec.all_linears():
        bits += found.model.schemes[layer].stored_bits(found.session.shapes[layer])
    weights = sum(rows * columns for rows, columns in (found.session.shapes[name] for name in spec.all_linears()))
    assert 5.5 < bits / weights <= 6.0
    experts = {found.model.schemes[layer] for expert in spec.expert_linears(0) for layer in expert.values()}
    assert experts == {QuantScheme(4, 32), INT8_G32}


@every_routed
def test_experts_are_held_once(variant: str, tmp_path: Path) -> None:
    decoder = Decoder(open_checkpoint(saved(variant, tmp_path / "model")))
    tensors = decoder.block_tensors(0)
    with decoder.block(0, tensors) as module:
        parameters = dict(module.named_parameters())
        for layer in decoder.spec.block_linears(0):
            place = decoder.place(0, layer)
            assert place.of(parameters[place.parameter]).data_ptr() == tensors[f"{layer}.weight"].data_ptr()
    # One replaced expert is one more copy, and the given tensors stay as they are.
    layer = decoder.spec.block_linears(0)[-1]
    kept = tensors[f"{layer}.weight"].clone()
    with decoder.block(0, tensors | {f"{layer}.weight": torch.zeros_like(kept)}) as module:
        place = decoder.place(0, layer)
        assert not place.of(module.get_parameter(place.parameter)).any()
    assert torch.equal(tensors[f"{layer}.weight"], kept)
