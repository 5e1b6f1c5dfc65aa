"""llama.cpp computes, from the file of every family, what the torch decoder computes with the same weights."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compress import engine, registry
from compress.errors import CompressError, InputError
from compress.models.checkpoint import open_checkpoint
from compress.models.decoder import Decoder
from compress.models.topology import FAMILIES, DecoderSpec, describe
from compress.protocols import Artifact
from compress.recipe import loads
from compress.runner.llamacpp import LlamaCppRuntime
from compress.scheme import QuantScheme
from compress.session import CompressedModel
from exporters.gguf import FLOAT_PARITY_KLD, GgufExporter
from exporters.gguf.families import GGUF_FAMILIES
from exporters.gguf.limits import context_length
from tests.compress.families import ROUTED, VARIANTS, saved, tokens_of
from tests.compress.runs import sentences
from tests.support import fake_quantized, mean_kld, rounded_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
every_variant = pytest.mark.parametrize("variant", VARIANTS)
COMPUTED: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 32},
    "gemma3": {"head_dim": 32},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "qwen2_moe": {"mlp_only_layers": []},
}
"""Settings of the variants that llama.cpp computes."""
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
"""Widths that quantised blocks divide: llama.cpp's AMX kernels compute narrower layers of 4 bits wrongly."""
LENGTH = 24
"""Three times the windows of the variants."""


def checkpoint(variant: str, folder: Path, **overrides: Any) -> Path:
    """The variant as llama.cpp computes it, with a tokenizer."""
    saved(variant, folder / "model", **(COMPUTED.get(variant, {}) | overrides))
    tiny_tokenizer(folder / "model")
    return folder / "model"


def model_of(variant: str, folder: Path, scheme: str | None = None, **overrides: Any) -> CompressedModel:
    """Rounded naively, or (None) with every layer in floating point."""
    source = checkpoint(variant, folder, **overrides)
    return rounded_model(source, folder / "work", scheme, ends=None if scheme is None else "int8-g32")


def export(model: CompressedModel, folder: Path, float_type: str = "f32") -> Artifact:
    folder.mkdir()
    return GgufExporter(float_type).write(model, folder)


def length_of(model: CompressedModel) -> int:
    """Beyond a window that llama.cpp heeds; up to one that it ignores."""
    return min(LENGTH, context_length(describe(model.config)))


def torch_logits(model: CompressedModel, tokens: Tensor) -> Tensor:
    return torch.stack(list(Decoder(open_checkpoint(model.folder), model.parameter).logits(tokens)))


def complaints(variant: str, folder: Path, **overrides: Any) -> list[str]:
    """What the exporter says about a variant in floating point."""
    spec, shapes = described(variant, folder, **overrides)
    return list(GgufExporter().check(spec, {}, shapes))


def described(variant: str, folder: Path, **overrides: Any) -> tuple[DecoderSpec, dict[str, tuple[int, int]]]:
    model = model_of(variant, folder, **overrides)
    return describe(model.config), dict(model.shapes)


def test_every_family_of_the_torch_side_has_a_row() -> None:
    assert set(GGUF_FAMILIES) == set(FAMILIES)


def check_logits(model: CompressedModel, artifact: Artifact, limit: float) -> None:
    """Prefill, and decoding from the middle on, against the torch decoder."""
    length = length_of(model)
    tokens, half = tokens_of(1, length), length // 2
    expected = torch_logits(model, tokens)[0]
    runtime = LlamaCppRuntime()
    runtime.load(artifact.path / artifact.entry, threads=1, context=length)
    prefill = runtime.prefill(tokens[0].numpy(), all_logits=True)
    steps = [runtime.prefill(tokens[0, :half].numpy()), *map(runtime.decode, tokens[0, half:].tolist())]
    runtime.close()
    assert float(expected.std()) > 0.3
    assert mean_kld(expected, torch.from_numpy(prefill)) < limit
    assert mean_kld(expected[half - 1 :], torch.from_numpy(np.stack(steps))) < limit


@every_variant
def test_float_file_computes_what_torch_computes(variant: str, tmp_path: Path) -> None:
    model = model_of(variant, tmp_path)
    check_logits(model, export(model, tmp_path / "out"), FLOAT_PARITY_KLD)


HEADS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"num_attention_heads": 8, "num_key_value_heads": 2}) for name in ("qwen2", "olmo2", "granite", "phi3")),
    *((name, {"head_dim": 32}) for name in ("llama", "smollm3", "mixtral", "qwen3_moe")),
    ("gemma", {"head_dim": 32, "num_key_value_heads": 4}),
    ("qwen3", {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}),
]


@pytest.mark.parametrize(("variant", "heads"), HEADS, ids=str)
def test_heads_of_other_sizes_agree_too(variant: str, heads: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(variant, tmp_path, **heads)
    check_logits(model, export(model, tmp_path / "out"), FLOAT_PARITY_KLD)


@every_variant
def test_greedy_text_is_the_same_as_in_torch(variant: str, tmp_path: Path) -> None:
    model = model_of(variant, tmp_path)
    artifact, length = export(model, tmp_path / "out"), length_of(model)
    prompt = tokens_of(1, length // 2)
    runtime = LlamaCppRuntime()
    runtime.load(artifact.path / artifact.entry, threads=1, context=length)
    found = [int(runtime.prefill(prompt[0].numpy()).argmax())]
    while len(found) < length - length // 2:
        found.append(int(runtime.decode(found[-1]).argmax()))
    runtime.close()
    expected = fake_quantized(model).generate(
        prompt, max_new_tokens=len(found), do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert found == expected[0, prompt.shape[1] :].tolist()


@every_variant
def test_every_weight_reads_back_to_the_bit(variant: str, tmp_path: Path) -> None:
    """Schemes change from layer to layer, and from one projection of the experts to the next."""
    source = checkpoint(variant, tmp_path, **WIDE)
    spec = describe(open_checkpoint(source).config)
    schemes = itertools.cycle(["int4-g32", "int8-g32", None, "int4-g32-asym", "q5_1"])
    exporter = GgufExporter("f32")
    chosen: dict[str, str | None] = {}
    for layers in (*exporter.one_scheme(spec), *((layer,) for layer in spec.all_linears())):
        scheme = next(schemes)
        chosen = {**dict.fromkeys(layers, scheme), **chosen}
    model = rounded_model(source, tmp_path / "work", plan=chosen)
    artifact = export(model, tmp_path / "out")
    for layer, values in exporter.read_back(artifact, list(model.layers())):
        assert values.tobytes() == model.weight(layer).numpy().tobytes(), layer
    rows = {row.layer: row for row in exporter.inspect(artifact) if row.layer}
    assert rows.keys() == {*model.layers(), *spec.float_linears()}
    for layer, shape in model.shapes.items():
        assert rows[layer].shape == shape
        assert 8 * rows[layer].bytes == exporter.stored_bits(model.schemes.get(layer), shape), layer
    stored = sum(tensor.n_bytes for tensor in gguf.GGUFReader(artifact.path / artifact.entry).tensors)
    assert sum(row.bytes for row in exporter.inspect(artifact)) == stored


@every_variant
@pytest.mark.parametrize("scheme", ["int4-g32", "int8-g32"])
def test_a_run_proves_the_artifact(variant: str, scheme: str, tmp_path: Path) -> None:
    folder = checkpoint(variant, tmp_path, **WIDE)
    spec = describe(open_checkpoint(folder).config)
    (tmp_path / "text.txt").write_text(sentences(1, 400))
    text = f"{{source: text, path: {tmp_path}/text.txt, sequence_length: {min(32, context_length(spec))}"
    recipe = loads(
        f"model: {folder}\npasses: [rtn: {{scheme: {scheme}}}]\nexport: [gguf]\nmeasure: false\n"
        f"calibration: {text}, samples: 4}}\nevaluate: {text}, windows: 2}}\n",
        registry.load,
    )
    report = engine.run(recipe, tmp_path / "out")
    (artifact,) = report.artifacts
    assert artifact.parity is not None
    assert artifact.parity.passed
    assert artifact.parity.tensors == len([*spec.ends, *spec.all_linears()])
    assert artifact.quality is not None
    ignored = context_length(spec) < spec.max_positions
    assert any("knows no sliding window" in text for text in report.warnings) == ignored


def stored(artifact: Artifact) -> dict[str, Any]:
    """Tensor of the file -> what gguf-py reads, rows in the order of the file."""
    return {tensor.name: tensor.data for tensor in gguf.GGUFReader(artifact.path / artifact.entry).tensors}


def keys(artifact: Artifact) -> dict[str, Any]:
    reader = gguf.GGUFReader(artifact.path / artifact.entry)
    return {key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.")}


GEMMA_NORMS = {
    "gemma": {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    "gemma2": {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
GEMMA_NORMS["gemma3"] = GEMMA_NORMS["gemma2"] | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@pytest.mark.parametrize("variant", GEMMA_NORMS)
def test_norms_that_multiply_by_one_more_are_stored_as_one_more(variant: str, tmp_path: Path) -> None:
    """llama.cpp PR #5631: a norm of w computes x * (1 + w), and the file holds 1 + w, once; the head is tied."""
    model = model_of(variant, tmp_path)
    tensors, original = stored(export(model, tmp_path / "out", "f16")), load_file(model.folder / "model.safetensors")
    names = {f"blk.1.{name}.weight": f"model.layers.1.{layer}.weight" for name, layer in GEMMA_NORMS[variant].items()}
    names["output_norm.weight"] = "model.norm.weight"
    assert {name for name in tensors if "norm" in name and not name.startswith(("blk.0.", "blk.2."))} == set(names)
    for name, source in names.items():
        assert tensors[name].dtype == np.float32
        np.testing.assert_array_equal(tensors[name], original[source].numpy() + np.float32(1))
    assert "output.weight" not in tensors


@pytest.mark.parametrize("variant", ["qwen2", "qwen3", "gemma", "phi3", "olmo2", "qwen2_moe"])
def test_rows_of_queries_and_keys_stay_where_the_graph_takes_halves(variant: str, tmp_path: Path) -> None:
    """transformers #31766, the other way round: these families must not be permuted, and keep biases and norms."""
    model = model_of(variant, tmp_path, num_attention_heads=8, num_key_value_heads=2)
    tensors, original = stored(export(model, tmp_path / "out")), load_file(model.folder / "model.safetensors")
    parts = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_qkv": "qkv_proj"}
    parts |= {"attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}
    held = {
        f"blk.1.{name}.{kind}": original[f"model.layers.1.self_attn.{part}.{kind}"].numpy()
        for name, part in parts.items()
        for kind in ("weight", "bias")
        if f"model.layers.1.self_attn.{part}.{kind}" in original
    }
    assert held.keys() == {name for name in tensors if name.startswith("blk.1.attn_") and "output" not in name} - {
        "blk.1.attn_norm.weight"
    }
    for name, values in held.items():
        np.testing.assert_array_equal(tensors[name], values)


@pytest.mark.parametrize("variant", ["llama", "mistral", "smollm3", "granite", "mixtral"])
def test_rows_of_queries_and_keys_are_turned_where_the_graph_takes_pairs(variant: str, tmp_path: Path) -> None:
    """By the heads of each: grouped keys have fewer. Biases turn with their rows."""
    model = model_of(variant, tmp_path, num_attention_heads=8, num_key_value_heads=2)
    tensors, original = stored(export(model, tmp_path / "out")), load_file(model.folder / "model.safetensors")
    for role, heads in (("q", 8), ("k", 2)):
        for kind in ("weight", "bias"):
            name = f"model.layers.1.self_attn.{role}_proj.{kind}"
            assert (name in original) == (kind == "weight" or variant == "granite")
            if name in original:
                found = tensors[f"blk.1.attn_{role}.{kind}"]
                # The file has the pairs of a head side by side, the checkpoint its two halves.
                halves = found.reshape(heads, -1, 2, *found.shape[1:]).swapaxes(1, 2).reshape(found.shape)
                np.testing.assert_array_equal(halves, original[name].numpy())


@pytest.mark.parametrize("tied", [True, False])
@every_variant
def test_a_tied_head_is_the_embedding_and_another_one_is_not(variant: str, tied: bool, tmp_path: Path) -> None:
    """onnxruntime-genai #2306: two tensors that differ must not become one, nor one become two."""
    refused = complaints(variant, tmp_path / "refused", tie_word_embeddings=tied)
    if refused:
        [text] = refused
        assert variant in (("olmo2", "qwen2_moe") if tied else ("gemma", "gemma2"))
        assert "takes no embedding as its head" in text if tied else text.startswith("lm_head: llama.cpp's gemma")
        return
    model = model_of(variant, tmp_path, tie_word_embeddings=tied)
    artifact = export(model, tmp_path / "out")
    assert ("output.weight" in stored(artifact)) != tied
    check_logits(model, artifact, FLOAT_PARITY_KLD)
    with pytest.raises(CompressError, match="lm_head") if tied else nullcontext():
        assert list(GgufExporter().read_back(artifact, ["lm_head"]))


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


ROPES = {
    "linear": rope("linear", factor=4.0),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=64),
    "llama3": rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
}


SCALED = [
    (variant, kind)
    for variant in VARIANTS
    for kind in ROPES
    # The positions of these are typed, or longrope; transformers computes no yarn without a head size.
    if not variant.startswith(("gemma3", "phi3")) and (variant, kind) != ("mixtral", "yarn")
]


@pytest.mark.parametrize(("variant", "kind"), SCALED)
def test_scaled_positions_are_computed_or_refused_by_name(variant: str, kind: str, tmp_path: Path) -> None:
    refused = complaints(variant, tmp_path / "refused", **ROPES[kind])
    assert bool(refused) == (kind == "llama3" and variant not in ("llama", "mistral", "mixtral", "granite"))
    assert all("rope type 'llama3'" in text for text in refused)
    if not refused:
        model = model_of(variant, tmp_path, **ROPES[kind])
        check_logits(model, export(model, tmp_path / "out"), FLOAT_PARITY_KLD)


@pytest.mark.parametrize("variant", ["llama", "phi3", "granite"])
def test_longrope_takes_the_factors_that_the_model_takes(variant: str, tmp_path: Path) -> None:
    """The short ones in a context up to the original positions, the long ones for a text beyond them."""
    original = 256
    more: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": original}
    factors: dict[str, Any] = {
        "short_factor": [1 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    }
    longer: dict[str, Any] = {"max_position_embeddings": 2 * original, "original_max_position_embeddings": original}
    model = model_of(variant, tmp_path, **rope("longrope", **more, **factors), **longer)
    artifact = export(model, tmp_path / "out")
    spec = describe(model.config)
    [remark] = GgufExporter().remarks(spec, {})
    assert "more than 256 tokens" in remark
    for length in (40, original + 20):
        tokens = tokens_of(1, length)
        runtime = LlamaCppRuntime()
        runtime.load(artifact.path / artifact.entry, threads=1, context=length)
        found = runtime.prefill(tokens[0].numpy(), all_logits=True)
        runtime.close()
        assert mean_kld(torch_logits(model, tokens)[0], torch.from_numpy(found)) < FLOAT_PARITY_KLD, length


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "gelu"}, "llama.cpp computes llama with silu, not 'gelu'"),
    ("gemma2", {"head_dim": 24}, "attention scaled by 0.17"),
    ("gemma3", {"head_dim": 24}, "attention scaled by 0.17"),
    (
        "smollm3",
        {"no_rope_layers": [1, 0, 1, 0]},
        "blocks 1: llama.cpp's smollm3 rotates heads in blocks 0, 1, 2 alone",
    ),
    (
        "smollm3",
        {"no_rope_layers": [1, 1, 1, 1]},
        "blocks 3: llama.cpp's smollm3 rotates heads in blocks 0, 1, 2 alone",
    ),
    ("qwen2_moe", {"norm_topk_prob": True}, "qwen2moe does not scale the probabilities"),
    ("qwen3_moe", {"norm_topk_prob": False}, "qwen3moe scales the probabilities"),
    ("qwen3", {"attention_bias": True}, "has a bias in 2 blocks, which llama.cpp's qwen3 does not know"),
    ("gemma", {"attention_bias": True}, "has a bias in 2 blocks, which llama.cpp's gemma does not know"),
    ("smollm3", {"mlp_bias": True}, "has a bias in 4 blocks, which llama.cpp's smollm3 does not know"),
    ("qwen3", rope("dynamic", factor=2.0), "rope type 'dynamic' is none that llama.cpp computes for qwen3"),
]


@pytest.mark.parametrize(("variant", "settings", "complaint"), REFUSED, ids=str)
def test_what_llama_cpp_does_not_compute_is_refused(
    variant: str, settings: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    model = model_of(variant, tmp_path, **settings)
    biased = {layer for layer in model.shapes if model.has_dense(f"{layer}.bias")}
    found = GgufExporter().check(describe(model.config), {}, model.shapes, biased=biased)
    assert found
    assert all(complaint in text for text in found)
    with pytest.raises(InputError, match=complaint.split(" ", maxsplit=1)[0]):
        export(model, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_blocks_without_experts_are_refused_with_their_layers(tmp_path: Path) -> None:
    found = complaints("qwen2_moe", tmp_path, mlp_only_layers=[1])
    names = [
        f"model.layers.1.mlp.{name}_proj: llama.cpp's qwen2moe has no such layer" for name in ("gate", "up", "down")
    ]
    assert found == names


@pytest.mark.parametrize("variant", ["mistral", "qwen2 with a window", "phi3, heads rotated in part", "mixtral"])
def test_where_llama_cpp_ignores_a_window_the_context_ends_at_it(variant: str, tmp_path: Path) -> None:
    model = model_of(variant, tmp_path)
    artifact = export(model, tmp_path / "out")
    architecture = GGUF_FAMILIES[describe(model.config).family.name].architecture
    assert keys(artifact)[f"{architecture}.context_length"] == 8
    [remark] = GgufExporter().remarks(describe(model.config), {})
    assert "8 tokens of the model's 256" in remark
    runtime = LlamaCppRuntime()
    runtime.load(artifact.path / artifact.entry, threads=1, context=LENGTH)
    with pytest.raises(InputError, match="positions end at 8"):
        runtime.prefill(tokens_of(1, 9)[0].numpy())
    runtime.close()
    spec, _ = described(variant, tmp_path / "none", sliding_window=256)
    assert GgufExporter().remarks(spec, {}) == []


@pytest.mark.parametrize("kinds", [["full"] * 3, ["sliding"] * 3, ["full", "sliding", "sliding"]], ids=str)
@pytest.mark.parametrize("variant", ["gemma2", "gemma3"])
def test_windows_lie_in_the_blocks_that_the_model_names(variant: str, kinds: list[str], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": [f"{kind}_attention" for kind in kinds]}
    model = model_of(variant, tmp_path, **settings)
    check_logits(model, export(model, tmp_path / "out"), FLOAT_PARITY_KLD)


@pytest.mark.parametrize(("variant", "blocks"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_are_known_by_their_depth(variant: str, blocks: int, tmp_path: Path) -> None:
    """Their queries are scaled by the width of the model over its heads, which no key of the file says."""
    settings: dict[str, Any] = {"num_hidden_layers": blocks, "head_dim": 32, "query_pre_attn_scalar": 16}
    model = model_of(variant, tmp_path, **settings, layer_types=["sliding_attention", "full_attention"] * (blocks // 2))
    check_logits(model, export(model, tmp_path / "out"), FLOAT_PARITY_KLD)


def test_granite_states_its_factors(tmp_path: Path) -> None:
    found = keys(export(model_of("granite", tmp_path), tmp_path / "out"))
    factors = {"embedding_scale": 3.0, "attention.scale": 0.2, "residual_scale": 0.5, "logit_scale": 2.0}
    assert {key: found[f"granite.{key}"] for key in factors} == pytest.approx(factors)


@pytest.mark.parametrize("variant", ROUTED)
def test_experts_of_different_schemes_are_refused_by_number(variant: str, tmp_path: Path) -> None:
    spec, shapes = described(variant, tmp_path, moe_intermediate_size=64)
    plan = dict.fromkeys(shapes, QuantScheme.parse("int4-g32"))
    third, fourth = (spec.expert_linears(0)[index]["down"] for index in (2, 3))
    plan[third] = QuantScheme.parse("int8-g32")
    del plan[fourth]
    [text] = GgufExporter().check(spec, plan, shapes)
    assert text.startswith(third.replace("experts.2", "experts.*"))
    assert "int8-g32: 2; float: 3" in text
    assert "int4-g32: 0, 1" in text


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe"])
def test_a_mixed_plan_has_one_scheme_for_the_experts_of_a_tensor(variant: str, tmp_path: Path) -> None:
    folder = checkpoint(variant, tmp_path, **WIDE)
    spec = describe(open_checkpoint(folder).config)
    (tmp_path / "text.txt").write_text(sentences(1, 400))
    text = f"{{source: text, path: {tmp_path}/text.txt, sequence_length: {min(32, context_length(spec))}"
    recipe = loads(
        f"model: {folder}\npasses: [mixed: {{target_bits: 6.5, samples: 2}}, rtn: {{}}]\nexport: [gguf]\n"
        f"measure: false\ncalibration: {text}, samples: 4}}\nevaluate: false\n",
        registry.load,
    )
    report = engine.run(recipe, tmp_path / "out")
    (artifact,) = report.artifacts
    assert artifact.parity is not None
    assert artifact.parity.passed
    planned = {
        layer.layer: layer.scheme for record in report.passes if record.name == "mixed" for layer in record.layers
    }
    groups = GgufExporter().one_scheme(spec)
    assert len(groups) == 3 * spec.layers
    assert all(len({planned[layer] for layer in layers}) == 1 for layers in groups)
    assert set(planned.values()) == {"int4-g32", "int8-g32"}
    summary = next(record.summary for record in report.passes if record.name == "mixed")
    assert 6 < summary["achieved_bits"] <= 6.5


def test_a_pinned_expert_that_parts_from_the_others_is_refused_before_any_work(tmp_path: Path) -> None:
    folder = checkpoint("mixtral", tmp_path, **WIDE)
    recipe = loads(
        f"model: {folder}\npasses: [mixed: {{target_bits: 7}}, rtn: {{}}]\nexport: [gguf]\nevaluate: false\n"
        'measure: false\ncalibration: {sequence_length: 8}\npin: {"*.0.block_sparse_moe.experts.1.w2": int8-g32}\n',
        registry.load,
    )
    with pytest.raises(InputError) as caught:
        engine.run(recipe, tmp_path / "out")
    assert "gguf: model.layers.0.block_sparse_moe.experts.*.w2: GGUF stores them as one tensor" in caught.value.what
    assert "int4-g32: 0, 2, 3; int8-g32: 1" in caught.value.what


@pytest.mark.parametrize("card", ["---\nlicense: apache-2.0\nlicense_link: https://example.org/l\n---\n# Tiny\n", None])
def test_the_licence_of_a_model_card_goes_into_the_file(card: str | None, tmp_path: Path) -> None:
    model = model_of("llama", tmp_path)
    if card is not None:
        (model.folder / "README.md").write_text(card)
    found = keys(export(model, tmp_path / "out"))
    stated = {"general.license": "apache-2.0", "general.license.link": "https://example.org/l"} if card else {}
    assert {key: value for key, value in found.items() if key.startswith("general.license")} == stated


def test_sequences_beyond_the_context_of_the_file_are_refused_before_any_work(tmp_path: Path) -> None:
    folder = checkpoint("mistral", tmp_path)
    recipe = loads(
        f"model: {folder}\npasses: [rtn: {{}}]\nexport: [gguf, onnx]\n"
        "measure: {prompt_tokens: 5, generate_tokens: 4}\ncalibration: {sequence_length: 16}\n"
        "evaluate: {sequence_length: 12}\n",
        registry.load,
    )
    with pytest.raises(InputError) as caught:
        engine.run(recipe, tmp_path / "out")
    assert caught.value.what.splitlines() == [
        "evaluate.sequence_length: 12 tokens, and the file of gguf takes 8",
        "measure.prompt_tokens + generate_tokens: 9 tokens, and the file of gguf takes 8",
    ]
