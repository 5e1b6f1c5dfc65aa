"""GGUF files as source models: every family, every type, every way of scaling positions, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import libgguf
import numpy as np
import pytest
import torch

from compress.errors import InputError
from compress.models.checkpoint import open_checkpoint
from compress.models.decoder import Decoder
from compress.models.gguf import header
from compress.models.gguf.archs import ARCHS
from compress.models.gguf.header import READABLE, read_gguf, read_metadata
from compress.models.gguf.source import open_gguf
from compress.models.sources import open_model
from compress.models.topology import rope_frequencies
from compress.runner.llamacpp import LlamaCppRuntime
from tests.compress.families import blockwise, tokens_of
from tests.compress.gguf_files import metadata, tensors, vocabulary, write, written
from tests.support import mean_kld, tiny_llama

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama with wide heads": ("llama", {"head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {"num_hidden_layers": 7, "layer_types": None}),
    "phi3": ("phi3", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"attention_bias": False}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "qwen2_moe": ("qwen2_moe", {"mlp_only_layers": [], "num_hidden_layers": 2}),
    "qwen3_moe": ("qwen3_moe", {}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_tensor_of_a_file_is_the_checkpoints_and_it_computes_what_llama_cpp_does(
    name: str, tmp_path: Path
) -> None:
    variant, overrides = VARIANTS[name]
    if variant == "gemma3":
        kinds = ["full_attention" if (index + 1) % 6 == 0 else "sliding_attention" for index in range(7)]
        overrides = overrides | {"layer_types": kinds}
        local, whole = ({"rope_type": "default", "rope_theta": theta} for theta in (10000.0, 50000.0))
        overrides |= {"rope_parameters": {"sliding_attention": local, "full_attention": whole}}
        # llama.cpp has the queries' scale from the head size alone.
        overrides |= {"query_pre_attn_scalar": 24}
    if variant == "gemma2":
        overrides = overrides | {"query_pre_attn_scalar": 24}
    folder, file = written(variant, tmp_path, **overrides)
    original, found = open_checkpoint(folder), open_gguf(file, tmp_path / "cache")
    assert set(found.files) == set(original.files)
    for tensor in original.files:
        wanted = original.tensor(tensor).float()
        if variant.startswith("gemma") and tensor.endswith("norm.weight"):
            wanted = (wanted + 1) - 1
        assert found.shape(tensor) == tuple(wanted.shape)
        assert torch.equal(found.tensor(tensor), wanted), tensor
        assert torch.equal(found.slice(tensor)[1:3], wanted[1:3]), tensor
    tokens = tokens_of(1, 24)
    ours = next(Decoder(found).logits(tokens))
    assert float((ours - blockwise(folder, tokens)[0]).abs().max()) < 1e-4
    runtime = LlamaCppRuntime()
    runtime.load(file, threads=1, context=24)
    try:
        theirs = torch.from_numpy(runtime.prefill(tokens[0].numpy(), all_logits=True))
    finally:
        runtime.close()
    assert float(ours.std()) > 0.1
    assert mean_kld(ours, theirs) < 1e-4


def test_the_variants_cover_every_architecture() -> None:
    assert {variant for variant, _ in VARIANTS.values()} == {
        arch.family.removesuffix("_text") for arch in ARCHS.values()
    }


BLOCKS = 3
"""Of 256 numbers, in each row."""


def encoded(kind: str, rows: int) -> Any:
    """Bytes of a tensor [rows, 768] of a type, from random numbers quantised by ggml's own code."""
    values = np.random.default_rng(1).standard_normal((rows, 256 * BLOCKS)).astype(np.float32)
    number = gguf.GGMLQuantizationType[kind]
    if kind in ("F32", "F16", "BF16"):
        return gguf.quants.quantize(values, number)
    return libgguf.quantize_rows(values, number, np.ones(values.shape[1], dtype=np.float32))


@pytest.mark.parametrize("kind", sorted(READABLE))
def test_every_type_is_decoded_as_ggml_decodes_it(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(kind, 7)
    path = write(tmp_path / "one.gguf", "llama", {}, {}, {"a": data}, kinds={"a": kind})
    number = gguf.GGMLQuantizationType[kind]
    wanted = gguf.quants.dequantize(data, number)
    if kind not in ("F32", "F16", "BF16"):
        np.testing.assert_array_equal(libgguf.dequantize_rows(data, number), wanted)
    info = read_gguf(path).tensors["a"]
    assert (info.shape, info.type, info.bytes) == ((7, 768), kind, data.nbytes)
    # Two rows at a time, the last alone.
    monkeypatch.setattr(header, "CHUNK_BYTES", 2 * 4 * 768)
    np.testing.assert_array_equal(info.rows(0, 7), wanted)
    np.testing.assert_array_equal(info.rows(3, 6), wanted[3:6])


ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3, short": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_positions_are_those_of_the_configuration(name: str, tmp_path: Path) -> None:
    from exporters.gguf import GgufExporter
    from tests.support import rounded_model

    folder = tiny_llama(tmp_path / "model", head_dim=32, rope_parameters=ROPES[name], rms_norm_eps=1e-6)
    (tmp_path / "out").mkdir()
    artifact = GgufExporter(float_type="f32").write(
        rounded_model(folder, tmp_path / "work", scheme=None, ends=None), tmp_path / "out"
    )
    found = open_gguf(artifact.path / artifact.entry, tmp_path / "cache")
    assert {key: found.config["rope_parameters"][key] for key in ROPES[name]} == ROPES[name]
    assert found.config["rms_norm_eps"] == 1e-6
    original = json.loads((folder / "config.json").read_text())
    assert rope_frequencies(found.config) == rope_frequencies(original)
    tokens = tokens_of(1, 32) % 281
    assert torch.equal(blockwise(folder, tokens)[0], next(Decoder(found).logits(tokens)))


@pytest.mark.parametrize(("pattern", "full"), [(2, [1, 3]), ([True, False, False, True], [1, 2]), (None, [])])
def test_windows_of_gemma_3_come_as_a_period_or_block_by_block(pattern: Any, full: list[int], tmp_path: Path) -> None:
    folder, _ = written("gemma3", tmp_path, num_hidden_layers=4, layer_types=["full_attention"] * 4)
    config = json.loads((folder / "config.json").read_text())
    keys = metadata(config) | ({} if pattern is None else {"attention.sliding_window_pattern": pattern})
    keys["rope.freq_base_swa"] = 100.0
    file = write(tmp_path / "g.gguf", "gemma3", keys, vocabulary(folder, 320), tensors(folder, config))
    found = open_gguf(file, tmp_path / "cache").config
    assert [i for i, kind in enumerate(found["layer_types"]) if kind == "full_attention"] == full
    assert found["rope_parameters"]["sliding_attention"]["rope_theta"] == 100.0


def test_longrope_comes_from_both_lists_of_factors(tmp_path: Path) -> None:
    lists = {"short_factor": [1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0], "long_factor": [1.1 * i for i in range(1, 9)]}
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, **lists}
    folder, _ = written("phi3", tmp_path, rope_parameters=scaling, original_max_position_embeddings=64)
    config = json.loads((folder / "config.json").read_text())
    keys = metadata(config) | {"rope.scaling.original_context_length": 64, "rope.scaling.type": "longrope"}
    factors = {f"rope_factors_{kind}.weight": np.float32(lists[f"{kind}_factor"]) for kind in ("long", "short")}
    arrays = tensors(folder, config) | factors
    file = write(tmp_path / "long.gguf", "phi3", keys, vocabulary(folder, 320), arrays)
    found = open_gguf(file, tmp_path / "cache")
    for kind, values in lists.items():
        np.testing.assert_allclose(found.config["rope_parameters"][kind], values, rtol=1e-7)
    for length in (32, 96):
        tokens = tokens_of(1, length)
        difference = blockwise(folder, tokens)[0] - next(Decoder(found).logits(tokens))
        assert float(difference.abs().max()) < 1e-4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A llama's folder, and the metadata, vocabulary and tensors of its file."""
    folder, _ = written("llama", tmp_path_factory.mktemp("llama"))
    config = json.loads((folder / "config.json").read_text())
    return folder, metadata(config), vocabulary(folder, 320), tensors(folder, config)


Llama = tuple[Path, dict[str, Any], dict[str, Any], dict[str, Any]]


def refusal(file: Path, tmp_path: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_gguf(file, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("config.json"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("edit", "messages"),
    [
        ({"attention.head_count": None, "context_length": None}, ["llama.context_length: missing", "head_count: miss"]),
        ({"feed_forward_length": [96, 64]}, ["differs from block to block: [96, 64]"]),
        ({"rope.scaling.type": "su"}, ["rope scaling 'su'", "known: none, linear, yarn, longrope"]),
        ({"rope.scaling.attn_factor": 2.0}, ["attn_factor 2"]),
        ({"attention.value_length": 8, "attention.key_length": 16}, ["heads of values are not as wide"]),
    ],
)
def test_metadata_that_does_not_do_is_refused(
    edit: dict[str, Any], messages: list[str], llama: Llama, tmp_path: Path
) -> None:
    _, keys, words, arrays = llama
    keys = {key: value for key, value in (keys | edit).items() if value is not None}
    found = refusal(write(tmp_path / "bad.gguf", "llama", keys, words, arrays), tmp_path)
    assert all(message in found for message in messages), found


@pytest.mark.parametrize(
    ("edit", "messages"),
    [
        ({"model": None}, ["the file has no tokenizer"]),
        ({"model": "bert"}, ["kind 'bert' is not known; known: gpt2, llama"]),
        ({"pre": "smolm"}, ["pre-tokenizer 'smolm' is not known; did you mean 'smollm'?", "known: gpt-2"]),
        ({"merges": None, "eos_token_id": 5000}, ["0 merges for 320 tokens", "the eos token 5000 is none of the 320"]),
        ({"model": "llama"}, ["0 scores for 320 tokens"]),
        ({"token_type": [1, 1]}, ["2 types for 320 tokens"]),
        ({"tokens": ["a"] * 400, "token_type": [1] * 400}, ["400 tokens, and the embedding has 320", "399 tokens are"]),
    ],
)
def test_tokenizers_that_do_not_do_are_refused(
    edit: dict[str, Any], messages: list[str], llama: Llama, tmp_path: Path
) -> None:
    _, keys, words, arrays = llama
    words = {key: value for key, value in (words | edit).items() if value is not None}
    found = refusal(write(tmp_path / "bad.gguf", "llama", keys, words, arrays), tmp_path)
    assert all(message in found for message in messages), found


def test_architectures_and_tensors_that_are_not_known_are_named(llama: Llama, tmp_path: Path) -> None:
    _, keys, words, arrays = llama
    mamba = refusal(write(tmp_path / "m.gguf", "mamba", keys, words, arrays), tmp_path)
    assert "architecture 'mamba' is not known" in mamba
    assert all(name in mamba for name, _ in ARCHS)
    sparse = refusal(write(tmp_path / "q.gguf", "qwen2", keys | {"expert_count": 4}, words, arrays), tmp_path)
    assert "architecture 'qwen2' with experts is not known" in sparse
    more = arrays | {"blk.0.attn_sinks.weight": np.zeros(4, np.float32), "v.patch.weight": np.zeros(4, np.float32)}
    unknown = refusal(write(tmp_path / "u.gguf", "llama", keys, words, more), tmp_path)
    assert "2 tensors are no part of the family llama\nblk.0.attn_sinks.weight\nv.patch.weight" in unknown
    adapter = write(tmp_path / "a.gguf", "llama", keys, words, arrays, whole={"general.type": "adapter"})
    assert "general.type is adapter" in refusal(adapter, tmp_path)
    lacking = {name: values for name, values in arrays.items() if name != "blk.1.ffn_up.weight"}
    file = write(tmp_path / "l.gguf", "llama", keys, words, lacking)
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: missing"):
        Decoder(open_gguf(file, tmp_path / "cache"))


def test_damaged_files_are_refused(llama: Llama, tmp_path: Path) -> None:
    _, keys, words, arrays = llama
    whole = write(tmp_path / "whole.gguf", "llama", keys, words, arrays).read_bytes()
    bad = tmp_path / "bad.gguf"
    for content, message in (
        (b"", "the file is empty"),
        (b"GGML" + whole[4:], "no GGUF file"),
        (b"GGUF", "cut short"),
        (whole[:3000], "cut short"),
        (whole[:-20000], r"the file is cut short at \d+ bytes: \d+ of 21 tensors end beyond"),
        (whole[:4] + (1).to_bytes(4, "little") + whole[8:], "a GGUF file of version 1; versions 2 and 3 are read"),
        (whole[:4] + (3).to_bytes(4, "big") + whole[8:], "in the other order"),
        (whole[:8] + (1 << 50).to_bytes(8, "little") + whole[16:], "the"),
    ):
        bad.write_bytes(content)
        with pytest.raises(InputError, match=message) as caught:
            open_gguf(bad, tmp_path / "cache")
        assert str(bad) in str(caught.value)
    with pytest.raises(InputError, match="there is no such file"):
        open_model(str(tmp_path / "none.gguf"))


def test_a_header_with_a_wrong_byte_is_read_or_refused(llama: Llama, tmp_path: Path) -> None:
    _, keys, words, arrays = llama
    short = words | {"tokens": words["tokens"][:20], "token_type": words["token_type"][:20]}
    whole = write(tmp_path / "whole.gguf", "llama", keys, short, arrays)
    content, random = whole.read_bytes(), np.random.default_rng(0)
    start = min(info.offset for info in read_gguf(whole).tensors.values())
    bad, refused = tmp_path / "bad.gguf", list[str]()
    for at, value in zip(random.integers(0, start, 400), random.integers(0, 256, 400), strict=True):
        bad.write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
        for read in (read_gguf, read_metadata):
            try:
                read(bad)
            except InputError as error:
                refused.append(str(error))
    assert 100 < len(refused) < 700
    assert all(str(bad) in said for said in refused)


def test_a_type_that_nobody_knows_is_named_with_its_tensor(llama: Llama, tmp_path: Path) -> None:
    _, keys, words, arrays = llama
    file = write(tmp_path / "odd.gguf", "llama", keys, words, arrays)
    data, name = bytearray(file.read_bytes()), b"blk.1.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    data[at : at + 4] = (77).to_bytes(4, "little")
    file.write_bytes(bytes(data))
    found = refusal(file, tmp_path)
    assert "blk.1.ffn_up.weight: type number 77 is not known; known: BF16, F16" in found


def test_a_split_model_is_read_whole_or_its_missing_parts_are_named(llama: Llama, tmp_path: Path) -> None:
    folder, keys, words, arrays = llama
    names = [tmp_path / f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    items = list(arrays.items())
    for part, path in enumerate(names):
        counted = {"split.no": part, "split.count": 3, "split.tensors.count": len(items)}
        mine = dict(items[part::3])
        write(path, "llama", keys if part == 0 else {}, words if part == 0 else {}, mine, whole=counted)
    for path in names:
        found = open_gguf(path, tmp_path / "cache")
        original = open_checkpoint(folder)
        assert set(found.files) == set(original.files)
        assert all(torch.equal(found.tensor(name), original.tensor(name)) for name in found.files)
        assert set(found.files.values()) == set(names)
    alone = tmp_path / "renamed.gguf"
    alone.write_bytes(names[0].read_bytes())
    with pytest.raises(InputError, match=r"one of 3, and its name does not say which(?s:.*)NAME-00001-of-00003\.gguf"):
        open_gguf(alone, tmp_path / "cache")
    names[1].unlink()
    with pytest.raises(InputError, match=r"split into 3 files, and these are not there: m-00002-of-00003\.gguf"):
        open_gguf(names[0], tmp_path / "cache")


def test_single_values_are_read_without_the_arrays(llama: Llama, tmp_path: Path) -> None:
    _, keys, words, arrays = llama
    file = write(tmp_path / "m.gguf", "llama", keys, words, arrays)
    single, whole = read_metadata(file), read_gguf(file).metadata
    assert whole["tokenizer.ggml.tokens"] == words["tokens"]
    assert dict(single) == {key: value for key, value in whole.items() if not isinstance(value, list)}
    assert single["llama.block_count"] == 2
