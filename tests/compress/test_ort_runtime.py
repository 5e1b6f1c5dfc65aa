"""ONNX Runtime behind the runner's interface: the same logits however a sequence is cut, and clear refusals."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from compress.errors import InputError
from compress.runner.ort import NO_SPIN_VARIABLE, OrtRuntime
from exporters.onnx import OnnxExporter
from tests.support import fake_quantized, rounded_model, tiny_llama

TOKENS = np.random.default_rng(0).integers(0, 281, 40)


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    model = rounded_model(tiny_llama(folder / "m"), folder / "w")
    (folder / "out").mkdir()
    artifact = OnnxExporter(accuracy_level=0).write(model, folder / "out")
    with torch.no_grad():
        logits = fake_quantized(model)(torch.from_numpy(TOKENS)[None]).logits[0]
    np.save(folder / "out" / "expected.npy", logits.numpy())
    return artifact.path / artifact.entry


@pytest.fixture
def expected(entry: Path) -> np.ndarray:
    loaded: np.ndarray = np.load(entry.parent / "expected.npy")
    return loaded


@pytest.fixture
def runtime(entry: Path) -> Iterator[OrtRuntime]:
    opened = OrtRuntime(spin=False)
    opened.load(entry, threads=1, context=len(TOKENS))
    yield opened
    opened.close()


def close_to(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, atol=2e-4, rtol=0)


def test_prefill_gives_the_logits_of_every_token(runtime: OrtRuntime, expected: np.ndarray) -> None:
    close_to(runtime.prefill(TOKENS, all_logits=True), expected)


def test_prefill_gives_the_last_logits(runtime: OrtRuntime, expected: np.ndarray) -> None:
    close_to(runtime.prefill(TOKENS[:9]), expected[8])


def test_decode_continues_the_sequence(runtime: OrtRuntime, expected: np.ndarray) -> None:
    runtime.prefill(TOKENS[:5])
    steps = [runtime.decode(int(token)) for token in TOKENS[5:]]
    close_to(np.stack(steps), expected[5:])


def test_prefill_starts_a_new_sequence(runtime: OrtRuntime, expected: np.ndarray) -> None:
    runtime.prefill(TOKENS[::-1].copy())
    close_to(runtime.prefill(TOKENS[:12], all_logits=True), expected[:12])


@pytest.mark.parametrize("chunk", [1, 7, 20, 39, 40, 41])
@pytest.mark.parametrize("all_logits", [True, False])
def test_a_prefill_in_steps_gives_the_same_logits(
    entry: Path, expected: np.ndarray, chunk: int, all_logits: bool
) -> None:
    runtime = OrtRuntime(spin=False, chunk=chunk)
    runtime.load(entry, threads=2, context=64)
    close_to(runtime.prefill(TOKENS, all_logits), expected if all_logits else expected[-1])


def test_returned_logits_do_not_change_with_the_next_step(runtime: OrtRuntime) -> None:
    first = runtime.prefill(TOKENS[:5])
    copy = first.copy()
    runtime.decode(3)
    np.testing.assert_array_equal(first, copy)


def test_more_tokens_than_the_context_are_refused(runtime: OrtRuntime) -> None:
    runtime.prefill(TOKENS)
    with pytest.raises(InputError, match="41 tokens do not fit the context of 40"):
        runtime.decode(1)


def test_a_context_beyond_the_positions_is_refused(entry: Path) -> None:
    with pytest.raises(InputError, match="positions end at 256"):
        OrtRuntime(spin=False).load(entry, threads=1, context=257)


@pytest.mark.parametrize(("threads", "context"), [(0, 8), (-1, 8), (1, 0)])
def test_threads_and_context_are_at_least_one(entry: Path, threads: int, context: int) -> None:
    with pytest.raises(InputError, match="must both be at least 1"):
        OrtRuntime(spin=False).load(entry, threads, context)


def test_an_empty_sequence_is_refused(runtime: OrtRuntime) -> None:
    with pytest.raises(InputError, match="no tokens"):
        runtime.prefill(TOKENS[:0])


def test_a_damaged_file_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(InputError, match="ONNX Runtime cannot open this file"):
        OrtRuntime(spin=False).load(tmp_path / "model.onnx", threads=1, context=8)


def test_a_missing_data_file_is_the_users_error(entry: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(entry.read_bytes())
    with pytest.raises(InputError, match=r"model\.onnx\.data"):
        OrtRuntime(spin=False).load(tmp_path / "model.onnx", threads=1, context=8)


def test_a_graph_that_is_no_decoder_is_refused(tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [value], [result])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match="not a decoder with a cache"):
        OrtRuntime(spin=False).load(tmp_path / "model.onnx", threads=1, context=8)


def test_describe_says_what_runs(runtime: OrtRuntime, entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = runtime.describe()
    assert (described["library"], described["threads"], described["spinning"]) == ("onnxruntime", 1, False)
    assert described["providers"] == ["CPUExecutionProvider"]
    monkeypatch.setenv(NO_SPIN_VARIABLE, "1")
    quiet = OrtRuntime()
    quiet.load(entry, threads=2, context=8)
    assert (quiet.describe()["threads"], quiet.describe()["spinning"]) == (2, False)


def test_exact_leaves_activations_in_fp32(entry: Path, expected: np.ndarray, tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "m"), tmp_path / "w")
    (tmp_path / "out").mkdir()
    artifact = OnnxExporter(accuracy_level=4).write(model, tmp_path / "out")
    rounding, exact = OrtRuntime(spin=False), OrtRuntime(spin=False, exact=True)
    for runtime in (rounding, exact):
        runtime.load(artifact.path / artifact.entry, threads=1, context=64)
    close_to(exact.prefill(TOKENS, all_logits=True), expected)
    assert np.abs(rounding.prefill(TOKENS, all_logits=True) - expected).max() > 1e-3
    assert (rounding.describe()["exact"], exact.describe()["exact"]) == (False, True)


def test_a_cache_of_unnamed_width_has_that_of_the_file_beside(
    entry: Path, expected: np.ndarray, tmp_path: Path
) -> None:
    """As onnxruntime-genai's own builder writes them."""
    folder = shutil.copytree(entry.parent, tmp_path / "copy")
    model = onnx.load(folder / entry.name, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past_key_values.", "present.")):
            value.type.tensor_type.shape.dim[3].dim_param = "kv_cache_dim"
    onnx.save(model, folder / entry.name)
    runtime = OrtRuntime(spin=False)
    runtime.load(folder / entry.name, threads=1, context=len(TOKENS))
    close_to(runtime.prefill(TOKENS, all_logits=True), expected)
    assert runtime.kv_bytes(1) == 2 * 2 * 2 * 16 * 4
    (folder / "genai_config.json").unlink()
    with pytest.raises(InputError, match=r"how wide a head of its cache is, and no genai_config\.json"):
        runtime.load(folder / entry.name, threads=1, context=8)


def test_kv_bytes_counts_keys_and_values_of_every_layer(runtime: OrtRuntime) -> None:
    layers, kv_heads, head_dim = 2, 2, 16
    assert runtime.kv_bytes(100) == 2 * layers * kv_heads * head_dim * 4 * 100


def test_the_runtime_imports_no_torch() -> None:
    program = "import sys, compress.runner.ort; print('torch' in sys.modules or 'transformers' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )
