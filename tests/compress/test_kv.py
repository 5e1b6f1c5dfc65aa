"""A quantised key/value cache: what torch computes with is what ONNX Runtime stores, and scales are the best tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress import engine, registry
from compress.errors import InputError
from compress.kv import KVScales, KVScheme
from compress.models.checkpoint import open_checkpoint
from compress.models.decoder import Decoder
from compress.models.topology import rope_frequencies
from compress.passes.gptq import Gptq
from compress.passes.kv import CANDIDATES, LEAST_SHARE, Kv, fit_scale, turned
from compress.recipe import loads
from compress.store import Store
from tests.compress.families import VARIANTS, compressed, saved, tokens_of, whole_model
from tests.compress.runs import Bench
from tests.support import tiny_tokenizer

SCHEMES = [KVScheme.parse(text) for text in ("int8-channel", "int8-tensor", "int4-channel", "int4-tensor")]
HEADS, KV_HEADS, SIZE = 4, 2, 32


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_names_go_both_ways(scheme: KVScheme) -> None:
    assert KVScheme.parse(str(scheme)) == scheme


@pytest.mark.parametrize("text", ["int3-channel", "int8", "int8-g32", "fp8-tensor"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is no scheme of a cache: write int8-channel"):
        KVScheme.parse(text)


def attention(scheme: KVScheme) -> Any:
    """A session of one GroupQueryAttention whose cache is stored by ``scheme``."""
    import onnxruntime
    from onnx import TensorProto, helper

    kind = "PER_CHANNEL" if scheme.per_channel else "PER_TENSOR"
    dtype, size = (TensorProto.INT8, SIZE) if scheme.bits == 8 else (TensorProto.UINT8, SIZE // 2)
    inputs = ["q", "k", "v", "past_k", "past_v", "last", "total", *[""] * 5, "k_scale", "v_scale"]
    node = helper.make_node(
        "GroupQueryAttention",
        inputs,
        ["out", "new_k", "new_v"],
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        k_quant_type=kind,
        v_quant_type=kind,
        kv_cache_bit_width=scheme.bits,
    )

    def value(name: str, type_: int, dims: Any) -> Any:
        return helper.make_tensor_value_info(name, type_, dims)

    floats = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE}
    graph = helper.make_graph(
        [node],
        "attention",
        [
            *(value(name, TensorProto.FLOAT, [1, "s", width]) for name, width in floats.items()),
            *(value(name, dtype, [1, KV_HEADS, "p", size]) for name in ("past_k", "past_v")),
            *(value(name, TensorProto.INT32, [1]) for name in ("last", "total")),
            *(value(name, TensorProto.FLOAT, None) for name in ("k_scale", "v_scale")),
        ],
        [
            value("out", TensorProto.FLOAT, [1, "s", HEADS * SIZE]),
            *(value(name, dtype, [1, KV_HEADS, "t", size]) for name in ("new_k", "new_v")),
        ],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def numbers_in(stored: Any, scheme: KVScheme) -> Tensor:
    """Whole numbers [1, kv heads, tokens, size] of a cache; of 4 bits, 8 stands for 0, and the low half comes first."""
    if scheme.bits == 8:
        return torch.from_numpy(stored).float()
    halves = np.stack([stored & 15, stored >> 4], -1).reshape(*stored.shape[:3], SIZE)
    return torch.from_numpy(halves).float() - 8


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rounding_is_that_of_the_runtime_and_what_is_attended_to_is_rounded(scheme: KVScheme) -> None:
    torch.manual_seed(scheme.bits)
    scale = torch.rand(KV_HEADS, SIZE) + 0.5 if scheme.per_channel else torch.full((1, 1), 0.25)
    scales = KVScales(scheme, scale, scale.flip(-1))
    step = scale[None, :, None, :]
    # Halves too, and more than the numbers hold.
    halves = torch.randint(-3 * scheme.high, 3 * scheme.high, (1, KV_HEADS, 7, SIZE)) / 2 * step
    values = torch.randn(1, KV_HEADS, 7, SIZE) * scheme.high * 0.4
    queries = torch.randn(1, HEADS, 7, SIZE) * 0.02
    empty = np.zeros(
        (1, KV_HEADS, 0, SIZE if scheme.bits == 8 else SIZE // 2), np.int8 if scheme.bits == 8 else np.uint8
    )
    shape = (1, KV_HEADS, 1, SIZE) if scheme.per_channel else (1,)
    feeds = {
        name: x.transpose(1, 2).reshape(1, 7, -1).numpy() for name, x in (("q", queries), ("k", halves), ("v", values))
    }
    feeds |= {"past_k": empty, "past_v": empty, "last": np.array([6], np.int32), "total": np.array([7], np.int32)}
    feeds |= {"k_scale": scales.key.numpy().reshape(shape), "v_scale": scales.value.numpy().reshape(shape)}
    out, *stored = attention(scheme).run(None, feeds)
    kept = scales.rounded(halves, values)
    for found, wanted, by in zip(stored, kept, (scales.key, scales.value), strict=True):
        assert torch.equal(numbers_in(found, scheme) * by[None, :, None, :], wanted)
    mixed = torch.nn.functional.scaled_dot_product_attention(queries, *kept, is_causal=True, enable_gqa=True)
    assert torch.allclose(torch.from_numpy(out), mixed.transpose(1, 2).reshape(1, 7, -1), rtol=1e-4, atol=1e-4)


def naive_fit(parts: list[Tensor], scheme: KVScheme) -> tuple[Tensor, float]:
    """One channel (or all) at a time, one candidate after another."""
    whole = torch.cat(parts, 1)
    groups = whole.transpose(1, 2).reshape(-1, whole.shape[1]) if scheme.per_channel else whole.reshape(1, -1)
    scales, total = [], 0.0
    for group in groups:
        largest = float(group.abs().max())
        best = (float("inf"), 1.0)
        for number in range(CANDIDATES):
            share = 1 - (1 - LEAST_SHARE) * number / (CANDIDATES - 1)
            scale = largest / scheme.high * share if largest else 1.0
            rounded = (group * (1 / torch.tensor(scale))).round().clamp(scheme.low, scheme.high) * scale
            best = min(best, (float((group - rounded).square().sum()), scale))
        total += best[0]
        scales.append(best[1])
    shape = (whole.shape[0], whole.shape[2]) if scheme.per_channel else (1, 1)
    return torch.tensor(scales).view(shape), total / float(whole.square().sum())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_scales_are_the_best_of_those_tried(scheme: KVScheme) -> None:
    torch.manual_seed(1)
    # Channels of different sizes, one of them large at every token, one always 0, heavy tails.
    sizes = torch.logspace(-1, 1, KV_HEADS * SIZE).view(KV_HEADS, 1, SIZE)
    parts = [torch.randn(KV_HEADS, tokens, SIZE) ** 3 * sizes for tokens in (40, 25)]
    for part in parts:
        part[1, :, 3] += 200
        part[0, :, 5] = 0
    fit = fit_scale(parts, scheme)
    wanted, error = naive_fit(parts, scheme)
    assert fit.tokens == 65
    assert fit.error == pytest.approx(error, rel=1e-4)
    assert torch.allclose(fit.scale, wanted, rtol=1e-5)
    plain = fit_scale(parts, scheme, search=False)
    assert plain.error == plain.plain_error == fit.plain_error
    assert fit.error < 0.9 * plain.error or scheme.bits == 8
    apart = [fit_scale([part], scheme, search=False).scale for part in parts]
    # A channel that is always 0 has any scale: here 1.
    assert torch.equal(plain.scale, torch.maximum(*apart))


@pytest.mark.parametrize("variant", VARIANTS)
def test_keys_and_values_are_what_transformers_puts_into_its_cache(variant: str, tmp_path: Path) -> None:
    folder, tokens = saved(variant, tmp_path / "model"), tokens_of(2, 24)
    with torch.no_grad():
        cache = whole_model(folder)(tokens, use_cache=True).past_key_values
    decoder = Decoder(open_checkpoint(folder))
    hidden = decoder.room(tokens)
    decoder.embed_into(tokens, hidden)
    for index in range(decoder.spec.layers):
        with decoder.block(index) as module:
            keys, values = decoder.keys_and_values(index, module, hidden[:])
            decoder.run_block_into(index, module, hidden, hidden)
        layer, window = cache.layers[index], decoder.spec.attentions[index].window
        # A cache of a sliding window keeps no more than it needs.
        last = slice(None) if window is None else slice(-layer.keys.shape[-2], None)
        assert torch.allclose(keys[:, :, last], layer.keys, atol=1e-5)
        assert torch.allclose(values[:, :, last], layer.values, atol=1e-5)


def test_scales_come_from_the_quantised_block_and_no_padding(tmp_path: Path) -> None:
    folder, tokens = saved("llama", tmp_path / "model"), tokens_of(6, 32)
    real = torch.ones_like(tokens, dtype=torch.bool)
    real[:, 20:] = False
    run = compressed(folder, tmp_path / "work", [Gptq(), Kv(samples=4, context=32)], tokens, real)
    other = tokens.clone()
    other[:, 20:] = 7
    padded = compressed(folder, tmp_path / "padded", [Gptq(), Kv(samples=4, context=32)], other, real)
    for index in range(run.session.decoder.spec.layers):
        block = f"model.layers.{index}"
        one, two = run.model.kv(block), padded.model.kv(block)
        assert one is not None
        assert two is not None
        assert torch.equal(one.key, two.key)
        assert torch.equal(one.value, two.value)
    records = [record for record in run.done[1].layers if record.layer.startswith("model.layers.0")]
    assert [record.layer for record in records] == ["model.layers.0 keys", "model.layers.0 values"]
    assert [record.tokens for record in records] == [4 * 20] * 2
    decoder = Decoder(run.checkpoint, run.model.parameter)
    hidden = decoder.room(tokens)
    decoder.embed_into(tokens, hidden)
    with decoder.block(0) as module:
        keys, _ = decoder.keys_and_values(0, module, hidden[:4])
    found = run.model.kv("model.layers.0")
    assert found is not None
    assert torch.equal(found.key, fit_scale([window[:, :20] for window in keys], found.scheme).scale)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_key_turned_on_is_that_of_its_new_position(variant: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(variant, tmp_path / "model"))
    decoder = Decoder(checkpoint)
    # Where all tokens are one, attention mixes equal values: what enters a block does not depend on the position.
    tokens = torch.full((1, 24), 7)
    hidden = decoder.room(tokens)
    decoder.embed_into(tokens, hidden)
    for index, kind in enumerate(decoder.spec.attentions):
        with decoder.block(index) as module:
            (keys,), _ = decoder.keys_and_values(index, module, hidden[:])
            decoder.run_block_into(index, module, hidden, hidden)
        frequencies = [] if kind.rope is None else rope_frequencies(checkpoint.config, index)[0]
        first = keys[:, :1].expand_as(keys)
        assert torch.allclose(turned(first, torch.arange(24), frequencies), keys, atol=1e-4)
        assert torch.equal(turned(keys, torch.zeros(24), frequencies), keys)


def test_scales_hold_keys_beyond_the_calibration_windows(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model", num_hidden_layers=1, max_position_embeddings=2048)
    tokens, weights = tokens_of(8, 32), load_file(folder / "model.safetensors")
    # The first half of each head is small until it turns into the second, which for the last pairs takes long.
    rows = weights["model.layers.0.self_attn.k_proj.weight"].view(
        KV_HEADS, 2, -1, weights["model.norm.weight"].shape[0]
    )
    rows[:, 1] *= 20
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    passes = {context: [Kv(search=False, context=context), Gptq()] for context in (32, None)}
    runs = {context: compressed(folder, tmp_path / str(context), done, tokens) for context, done in passes.items()}
    decoder = Decoder(runs[None].checkpoint, runs[None].model.parameter)
    hidden = decoder.room(tokens)
    decoder.embed_into(tokens, hidden)
    with decoder.block(0) as module:
        keys, _ = decoder.keys_and_values(0, module, hidden[:])
    frequencies, _ = rope_frequencies(runs[None].checkpoint.config)
    clipped = {}
    for context, run in runs.items():
        scales = run.model.kv("model.layers.0")
        assert scales is not None
        far = torch.cat(
            [turned(window, torch.full((32,), shift), frequencies) for window in keys for shift in (600, 1900)]
        )
        held = scales.key.repeat(len(far) // len(scales.key), 1)[:, None] * scales.scheme.high
        clipped[context] = float((far.abs() > 1.01 * held).float().mean())
    assert clipped[32] > 0.05
    assert clipped[None] < 0.1 * clipped[32]


def test_positions_that_the_model_lacks_are_refused(bench: Bench) -> None:
    with pytest.raises(InputError, match=r"kv\.context: 100000 is more than the model's \d+ positions"):
        engine.plan(bench.recipe(passes="[rtn, {kv: {context: 100000}}]"))


def test_the_store_gives_scales_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    scales = KVScales(SCHEMES[0], torch.rand(2, 8), torch.rand(2, 8))
    store.put("a", {}, {}, scales)
    found = store.kv("a")
    assert found is not None
    assert found.scheme == scales.scheme
    assert torch.equal(found.key, scales.key)
    assert torch.equal(found.value, scales.value)
    assert store.kv("b") is None


@pytest.mark.parametrize("variant", ["llama", "gemma2", "qwen2 with a window"])
@pytest.mark.parametrize("kv", ["{bits: 8}", "{bits: 4}", "{bits: 4, scales: tensor}"])
def test_a_run_proves_the_cache_that_its_file_has(variant: str, kv: str, bench: Bench, tmp_path: Path) -> None:
    folder = saved(variant, tmp_path / "model", vocab_size=320)
    tiny_tokenizer(folder)
    out = tmp_path / "out"
    report = engine.run(bench.recipe(model=str(folder), passes=f"[{{kv: {kv}}}, rtn]"), out)
    (artifact,) = report.artifacts
    assert artifact.parity is not None
    # Floating-point caches would differ by far more: see below.
    assert artifact.parity.kld_mean < 1e-6
    # What the cache's rounding makes of the last bits of sums comes on top of the limit of a float cache.
    assert 1e-5 <= artifact.parity.kld_limit < 1e-3
    spec = Decoder(open_checkpoint(folder)).spec
    context = 8 + 4
    wanted = 2 * spec.layers * spec.kv_heads * spec.head_dim * (8 if "8" in kv else 4) // 8 * context
    assert artifact.performance is not None
    assert artifact.performance.memory["kv"].value == wanted


def test_a_cache_that_is_not_the_files_own_is_noticed(bench: Bench, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(KVScheme, "rounded", lambda self, found, scale: found)
    with pytest.raises(Exception, match="logits differ from the quantised torch model"):
        engine.run(bench.recipe(passes="[rtn, {kv: {bits: 4}}]"), tmp_path / "out")


def test_gguf_has_no_place_for_scales(bench: Bench) -> None:
    with pytest.raises(InputError, match="gguf: the file has no place for scales of a key/value cache"):
        engine.plan(bench.recipe(passes="[rtn, kv]", export="[onnx, gguf]"))


def test_standard_operators_have_no_quantised_cache(bench: Bench) -> None:
    with pytest.raises(InputError, match="onnx: the standard's operators have no cache in int4-channel"):
        engine.plan(bench.recipe(passes="[rtn, {kv: {bits: 4}}]", export="[{onnx: {dialect: standard}}]"))


def test_a_graph_in_f16_may_have_one(bench: Bench, tmp_path: Path) -> None:
    recipe = bench.recipe(passes="[rtn, {kv: {bits: 4}}]", export="[{onnx: {float_type: f16}}]")
    (artifact,) = engine.run(recipe, tmp_path / "out").artifacts
    assert artifact.parity is not None
    assert artifact.parity.kld_mean < 1e-3


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{bits: 3}", "bits: 3 is not 4 or 8"),
        ("{samples: 0}", "samples: 0 is not"),
        ("{context: 0}", "context: 0 is not"),
    ],
)
def test_settings_that_make_no_sense_are_refused(value: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        loads(f"model: x\npasses: [rtn, {{kv: {value}}}]\nexport: [onnx]\n", registry.load)
