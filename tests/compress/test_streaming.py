"""A bounded cache: the same logits as StreamingLLM's own definition, any length, and memory that does not grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress import engine
from compress.__main__ import main
from compress.errors import InputError
from compress.runner.chat import ChatSession
from compress.runner.ort import OrtRuntime
from compress.runner.streaming import Stream, Turn, turns
from compress.session import CompressedModel
from exporters.onnx import OnnxExporter
from tests.compress.exported import export
from tests.compress.families import saved
from tests.compress.runs import Bench
from tests.reference.streaming import logits_of
from tests.support import fake_quantized, rounded_model, tiny_llama

TOKENS = np.random.default_rng(3).integers(0, 281, 90)
STREAMS = [Stream(24, 4), Stream(8, 1), Stream(16, 0), Stream(3, 2), Stream(1, 1)]


def exported(model: CompressedModel, folder: Path, **arguments: Any) -> Path:
    folder.mkdir()
    artifact = OnnxExporter(0, **arguments).write(model, folder)
    return artifact.path / artifact.entry


def opened(entry: Path, stream: Stream, context: int = 1000) -> OrtRuntime:
    # Exact: in the standard dialect the runtime itself decides to round activations.
    runtime = OrtRuntime(spin=False, exact=True)
    runtime.keep(stream)
    runtime.load(entry, threads=1, context=context)
    return runtime


def streamed(runtime: OrtRuntime, prompt: int) -> torch.Tensor:
    """Logits of TOKENS: a prompt, then one after the other."""
    rows = [runtime.prefill(TOKENS[:prompt], all_logits=True)]
    rows += [runtime.decode(int(token))[None] for token in TOKENS[prompt:]]
    return torch.from_numpy(np.concatenate(rows))


def pieces(stream: Stream, prompt: int) -> list[int]:
    """How many tokens the runtime takes at a time."""
    whole, rest = divmod(prompt, stream.step)
    return [stream.step] * whole + [rest] * bool(rest) + [1] * (len(TOKENS) - prompt)


def expected(model: CompressedModel, stream: Stream, prompt: int) -> torch.Tensor:
    with torch.no_grad():
        return logits_of(
            fake_quantized(model), TOKENS.tolist(), pieces(stream, prompt), stream.window, stream.sinks, stream.step
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CompressedModel:
    folder = tmp_path_factory.mktemp("streaming")
    # Fewer positions than tokens: only a bounded cache goes so far.
    return rounded_model(tiny_llama(folder / "model", max_position_embeddings=40), folder / "work")


@pytest.fixture(scope="module")
def entry(model: CompressedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(model, tmp_path_factory.mktemp("entry") / "out")


@pytest.mark.parametrize("prompt", [1, 37])
@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_logits_are_those_of_the_definition(entry: Path, model: CompressedModel, stream: Stream, prompt: int) -> None:
    found = streamed(opened(entry, stream), prompt)
    torch.testing.assert_close(found, expected(model, stream, prompt), atol=5e-4, rtol=0)


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"head_dim": 24}, {}),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}, {}),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
            {},
        ),
        ({}, {"dialect": "standard"}),
    ],
    ids=["rotary operator", "linear", "yarn", "standard dialect"],
)
def test_tables_of_every_kind_turn_keys_back(
    settings: dict[str, Any], arguments: dict[str, Any], tmp_path: Path
) -> None:
    stream = Stream(12, 3)
    other = rounded_model(tiny_llama(tmp_path / "model", **settings), tmp_path / "work")
    found = streamed(opened(exported(other, tmp_path / "out", **arguments), stream), 30)
    torch.testing.assert_close(found, expected(other, stream, 30), atol=5e-4, rtol=0)


def test_blocks_without_positions_are_left_as_they_are(tmp_path: Path) -> None:
    stream = Stream(12, 3)
    other = rounded_model(saved("smollm3", tmp_path / "model"), tmp_path / "work")
    entry = exported(other, tmp_path / "out")
    found = turns(entry, stream.step)
    assert [found[f"past_key_values.{index}.key"] is None for index in range(2)] == [False, True]
    torch.testing.assert_close(streamed(opened(entry, stream), 30), expected(other, stream, 30), atol=5e-4, rtol=0)


def test_heads_that_are_rotated_in_part_turn_in_that_part(tmp_path: Path) -> None:
    other = rounded_model(saved("phi3, heads rotated in part", tmp_path / "model"), tmp_path / "work")
    turn = turns(exported(other, tmp_path / "out"), 5)["past_key_values.0.key"]
    assert turn is not None
    keys = np.random.default_rng(0).standard_normal((1, 2, 7, 16)).astype(np.float32)
    assert len(turn.cos) == 4
    turned = turn.apply(keys)
    np.testing.assert_array_equal(turned[..., 8:], keys[..., 8:])
    angles = -5 * 10000.0 ** (-np.arange(4) / 4)
    pairs = (keys[..., :4] + 1j * keys[..., 4:8]) * np.exp(1j * angles)
    np.testing.assert_allclose(turned[..., :8], np.concatenate([pairs.real, pairs.imag], -1), atol=1e-5)


def test_turning_in_steps_is_turning_at_once() -> None:
    angles = np.random.default_rng(1).random(8)
    turn = Turn(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    twice = Turn(np.cos(2 * angles).astype(np.float32), np.sin(2 * angles).astype(np.float32))
    keys = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    np.testing.assert_allclose(turn.apply(turn.apply(keys)), twice.apply(keys), atol=1e-6)
    assert turn.apply(keys.astype(np.float16)).dtype == np.float16


def test_what_fits_is_computed_as_without_a_window(entry: Path) -> None:
    whole, bounded = OrtRuntime(spin=False), opened(entry, Stream(36, 4))
    whole.load(entry, threads=1, context=40)
    np.testing.assert_allclose(bounded.prefill(TOKENS[:40], True), whole.prefill(TOKENS[:40], True), atol=1e-4)
    # A new sequence starts with an empty cache.
    np.testing.assert_allclose(bounded.prefill(TOKENS[50:60], True), whole.prefill(TOKENS[50:60], True), atol=1e-4)


def test_the_cache_is_as_large_as_the_window_whatever_the_length(entry: Path) -> None:
    runtime = opened(entry, Stream(24, 4), context=100_000)
    assert runtime.describe()["context"] == 28
    assert runtime.describe()["stream"] == "4 first and 24 last tokens kept"
    long = np.tile(TOKENS, 3)
    np.testing.assert_array_equal(runtime.prefill(long), runtime.prefill(long, all_logits=True)[-1])
    assert opened(entry, Stream(24, 4), context=10).describe()["context"] == 10


def test_a_quantised_cache_and_a_window_beyond_the_positions_are_refused(
    entry: Path, bench: Bench, tmp_path: Path
) -> None:
    recipe = bench.recipe(passes="[rtn, {kv: {bits: 8}}]", measure="false", evaluate="false")
    engine.run(recipe, tmp_path / "run")
    with pytest.raises(InputError, match=r"cache of tensor\(int8\) cannot be turned to other positions"):
        opened(tmp_path / "run" / "onnx" / "model.onnx", Stream(8, 1))
    with pytest.raises(InputError, match="a context of 52 tokens was asked for, and the model's positions end at 40"):
        opened(entry, Stream(48, 4))
    with pytest.raises(InputError, match="40 positions: 200 tokens cannot be dropped at a time"):
        opened(entry, Stream(800, 4))


def test_windows_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str], bench: Bench) -> None:
    out = bench.finished("rtn").out / "onnx"
    for command in (["bench", str(out)], ["chat", str(out)], ["eval", str(out), "--reference", str(bench.model)]):
        assert main([*command, "--window", "0", "--sinks", "-1"]) == 2
        said = capsys.readouterr().err
        assert "--window: must be at least 1, got 0" in said
        assert "--sinks: must be at least 0, got -1" in said
    with pytest.raises(ValueError, match="window: must be at least 1"):
        Stream(0, 4)


def test_a_format_without_a_window_is_refused(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    out = bench.finished("rtn").out
    asked = [["bench"], ["chat"], ["eval", "--reference", str(bench.model)]]
    for name, *more in [*asked, ["eval", "--kv-keys", "q8_0", *asked[2][1:]]]:
        assert main([name, str(out / "gguf"), "--window", "8", *more]) == 2
        assert "no window over its cache" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"gguf: measure\.window: this format's runtime has no window"):
        engine.plan(bench.recipe(export="[onnx, gguf]", measure="{window: 8}"))


def test_bench_eval_and_a_run_say_that_the_cache_was_bounded(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = "cache bounded: 2 first and 16 last tokens kept"
    # More tokens than the model has positions.
    measure = "{threads: 1, prompt_tokens: 250, generate_tokens: 20, repeats: 1, window: 16, sinks: 2}"
    (artifact,) = engine.run(bench.recipe(measure=measure), tmp_path / "out").artifacts
    assert artifact.performance is not None
    assert kept in artifact.performance.decode_tps.how
    assert artifact.performance.memory["kv"].value == 2 * 2 * 2 * 16 * 4 * (16 + 2)
    bounds = ["--window", "16", "--sinks", "2", "--json"]
    onnx = str(tmp_path / "out" / "onnx")
    sizes = ["--prompt-tokens", "40", "--generate-tokens", "4", "--repeats", "1", "--threads", "1"]
    assert main(["bench", onnx, *sizes, *bounds]) == 0
    assert kept in json.loads(capsys.readouterr().out)["ttft_s"]["how"]
    text = ["--source", "text", "--path", str(bench.folder / "evaluation.txt"), "--windows", "2"]
    lost = []
    for extra in (["--json"], bounds, ["--window", "64", "--json"]):
        found = ["eval", onnx, "--reference", str(bench.model), *text, "--sequence-length", "64", *extra]
        assert main(found) == 0
        lost.append(json.loads(capsys.readouterr().out)["kld_mean"])
    whole, bounded, fits = lost
    assert bounded > 1.5 * whole
    assert fits == pytest.approx(whole, rel=1e-3)


def test_a_chat_goes_on_beyond_the_positions(tmp_path: Path) -> None:
    path = export(tmp_path, max_position_embeddings=64)["onnx"].path
    messages = [{"role": "user", "content": "quick brown fox " * 40}]
    with ChatSession(path, threads=1, raw=True) as session, pytest.raises(InputError, match="but the context 64"):
        next(session.reply(messages))
    with ChatSession(path, threads=1, raw=True, stream=Stream(28, 4)) as session:
        assert "".join(session.reply(messages, max_tokens=5)) or session.finish_reason == "stop"
        assert session.finish_reason in ("stop", "length")
