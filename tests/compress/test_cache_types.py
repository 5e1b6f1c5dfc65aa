"""llama.cpp's key/value cache in types chosen when it runs: real sizes, quality, and what is refused before loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from compress.__main__ import main
from compress.errors import InputError
from compress.kv import CACHE_TYPES, FLOAT_CACHE, CacheTypes
from compress.models.decoder import Decoder
from compress.models.gguf.source import open_gguf
from compress.proof import write_logits
from compress.runner.llamacpp import LlamaCppRuntime
from compress.runner.process import Job, QualitySettings, run_job
from compress.session import no_progress
from tests.compress.families import tokens_of
from tests.compress.gguf_files import written
from tests.compress.runs import Bench

LENGTH = 64


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with heads of 32."""
    _, path = written("llama", tmp_path_factory.mktemp("cache"), head_dim=32)
    return path


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with heads of 48 and of 20 in no multiple of 32."""
    _, path = written("qwen3", tmp_path_factory.mktemp("narrow"), head_dim=48)
    return path


def logits(file: Path, cache: CacheTypes) -> Any:
    runtime = LlamaCppRuntime(cache)
    runtime.load(file, threads=1, context=LENGTH)
    try:
        return runtime.prefill(tokens_of(1, LENGTH)[0].numpy(), all_logits=True)
    finally:
        runtime.close()


def test_types_have_ggmls_numbers_and_sizes() -> None:
    for name, stored in CACHE_TYPES.items():
        kind = gguf.GGMLQuantizationType[name.upper()]
        assert (stored.number, gguf.GGML_QUANT_SIZES[kind]) == (int(kind), (stored.block, stored.bytes))


@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_every_type_runs_and_its_size_is_the_one_that_llama_cpp_reserves(kind: Any, file: Path) -> None:
    runtime = LlamaCppRuntime(CacheTypes(keys=kind, values="f16"))
    runtime.load(file, threads=1, context=2048)
    try:
        found = runtime.describe()
        said = sum(runtime._cache_mib)
        # 2 blocks, 2 key/value heads of 32.
        stored = CACHE_TYPES[kind]
        bytes_ = found["context"] * 2 * 2 * (32 // stored.block * stored.bytes + 32 * 2)
        assert found["kv_bytes"] == bytes_
        assert bytes_ / 2**20 == pytest.approx(said, abs=0.0051)
        assert found["kv_how"].startswith("measured")
        assert found["kv_type"] == ("f16" if kind == "f16" else f"keys {kind}, values f16")
        assert runtime.prefill(np.arange(8)).std() > 0
    finally:
        runtime.close()


def test_each_type_loses_more_than_a_wider_one_and_keys_and_values_are_apart(file: Path) -> None:
    plain = logits(file, CacheTypes("f32", "f32"))

    def lost(keys: Any, values: Any) -> float:
        return float(np.abs(logits(file, CacheTypes(keys, values)) - plain).mean())

    for narrower, wider in (("q8_0", "f16"), ("q5_0", "q8_0"), ("q4_0", "q5_0")):
        assert lost(narrower, "f16") > lost(wider, "f16")
        assert lost("f16", narrower) > lost("f16", wider)
    assert lost("f16", "f16") > 0
    assert lost("q4_0", "f16") != lost("f16", "q4_0")


def test_keys_in_f32_that_flash_attention_would_round_are_refused(file: Path) -> None:
    with pytest.raises(InputError, match=r"f32 is rounded to f16 where values are quantised \(q8_0\): choose f16"):
        LlamaCppRuntime(CacheTypes("f32", "q8_0")).load(file, threads=1, context=16)


def test_a_window_makes_smaller_caches_and_the_number_is_llama_cpps_own(tmp_path: Path) -> None:
    _, path = written("gemma2", tmp_path, query_pre_attn_scalar=24, max_position_embeddings=4096, vocab_size=320)
    runtime = LlamaCppRuntime()
    runtime.load(path, threads=1, context=4096)
    try:
        found, whole = runtime.describe(), runtime.kv_bytes(4096)
        assert found["kv_bytes"] == round(sum(runtime._cache_mib) * 2**20)
        assert found["kv_bytes"] < 0.8 * whole
    finally:
        runtime.close()


@pytest.mark.parametrize(("keys", "values", "count"), [("q8_0", "f16", 1), ("q4_0", "q8_0", 2), ("f16", "iq4_nl", 1)])
def test_heads_that_are_no_multiple_of_a_block_are_refused_before_loading(
    keys: Any, values: Any, count: int, narrow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.runner.llamacpp._library", lambda: pytest.fail("loaded"))
    with pytest.raises(InputError) as caught:
        LlamaCppRuntime(CacheTypes(keys, values)).load(narrow, threads=1, context=16)
    assert caught.value.what.count("holds 32 numbers in a block, and heads of 48 are no multiple") == count


def test_the_comparison_is_made_with_the_cache_and_parity_without(file: Path, tmp_path: Path) -> None:
    tokens = tokens_of(2, LENGTH)
    np.save(tmp_path / "tokens.npy", tokens.numpy())
    decoder = Decoder(open_gguf(file, tmp_path))
    write_logits(decoder, tokens, tmp_path / "reference.npy", "reference", no_progress)
    files = QualitySettings(*(str(tmp_path / f"{name}.npy") for name in ("tokens", "reference", "reference")))

    def found(cache: CacheTypes) -> Any:
        return run_job(Job("gguf", str(file), 1, quality=files, cache=cache))

    plain, rounded = found(FLOAT_CACHE), found(CacheTypes("q4_0", "q4_0"))
    assert plain.quality.kld_mean == pytest.approx(plain.parity_kld)
    assert rounded.quality.kld_mean > 10 * plain.quality.kld_mean
    assert rounded.parity_kld == pytest.approx(plain.parity_kld)
    assert rounded.runtime["kv_type"] == "q4_0"


def test_a_job_refuses_types_that_are_none_and_runtimes_that_have_no_choice() -> None:
    files = QualitySettings("t.npy", "r.npy")
    with pytest.raises(InputError, match="keys of the cache: no type 'q9'"):
        Job("gguf", "m.gguf", 1, quality=files, cache=CacheTypes("q9", "f16"))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a cache of q8_0 was asked for: what runs onnx files takes"):
        Job("onnx", "m.onnx", 1, quality=files, cache=CacheTypes("q8_0", "q8_0"))
    job = Job("gguf", "m.gguf", 1, quality=files, cache=CacheTypes("q8_0", "f16"))
    assert Job.from_json(job.to_json()) == job


def test_a_recipe_chooses_the_cache_of_its_gguf_file(bench: Bench, tmp_path: Path) -> None:
    measure = "{threads: 1, prompt_tokens: 8, generate_tokens: 4, repeats: 1, kv_keys: q8_0, kv_values: q8_0}"
    wrong = bench.file(tmp_path / "wrong.yaml", measure=measure, export="[onnx]")
    assert main(["run", str(wrong), "--out", str(tmp_path / "out"), "--quiet"]) == 2
    assert not (tmp_path / "out").exists()


def test_what_a_recipe_asks_of_a_cache_is_checked_against_the_model(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = "{threads: 1, prompt_tokens: 8, generate_tokens: 4, repeats: 1, kv_keys: q8_0, kv_values: q4_0}"
    # The tiny model's heads have 16 channels.
    wrong = bench.file(tmp_path / "wrong.yaml", measure=measure, export="[onnx]")
    assert main(["plan", str(wrong)]) == 2
    said = capsys.readouterr().err
    assert "measure: keys: q8_0 holds 32 numbers in a block, and heads of 16 are no multiple" in said
    assert "measure: values: q4_0 holds 32 numbers in a block, and heads of 16 are no multiple" in said
    assert "a cache of keys q8_0, values q4_0 is for gguf artifacts, and none is exported" in said


def test_bench_and_eval_take_the_types(file: Path, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    types = ["--kv-keys", "q8_0", "--kv-values", "q5_1"]
    short = ["--prompt-tokens", "8", "--generate-tokens", "2", "--repeats", "1", "--threads", "1"]
    assert main(["bench", str(file), *types, *short, "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]["kv"]
    assert "keys q8_0, values q5_1" in memory["how"]
    text = ["--source", "text", "--path", str(bench.folder / "evaluation.txt"), "--windows", "2"]
    found = []
    for chosen in ([], types, ["--kv-keys", "q4_0", "--kv-values", "q4_0"]):
        command = ["eval", str(file), "--reference", str(file), *text, "--sequence-length", "32", *chosen, "--json"]
        assert main(command) == 0
        found.append(json.loads(capsys.readouterr().out)["kld_mean"])
    assert found[0] < found[1] < found[2]
    (onnx,) = bench.finished("gptq").out.glob("onnx/model.onnx")
    assert main(["bench", str(onnx), *types, *short]) == 2
    assert "takes the cache's type from the file" in capsys.readouterr().err
    assert main(["eval", str(onnx), "--reference", str(bench.model), *text, *types, "--sequence-length", "32"]) == 2
    assert "heads of 16 are no multiple" in capsys.readouterr().err
