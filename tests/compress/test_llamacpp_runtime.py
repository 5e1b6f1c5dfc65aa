"""One GGUF file in llama.cpp: sequences start anew, long prompts are cut in batches, errors say what to do."""

from __future__ import annotations

import builtins
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.errors import CompressError, InputError
from compress.runner import llamacpp
from compress.runner.llamacpp import LlamaCppRuntime
from exporters.gguf import GgufExporter
from tests.support import TEMPLATE, rounded_model, tiny_llama

POSITIONS = 700


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gguf")
    folder = tiny_llama(
        root / "model", chat_template=TEMPLATE, max_position_embeddings=POSITIONS, head_dim=32, num_attention_heads=4
    )
    (root / "out").mkdir()
    artifact = GgufExporter().write(rounded_model(folder, root / "work"), root / "out")
    return artifact.path / artifact.entry


@pytest.fixture
def runtime(entry: Path) -> Iterator[LlamaCppRuntime]:
    runtime = LlamaCppRuntime()
    runtime.load(entry, threads=1, context=POSITIONS)
    yield runtime
    runtime.close()


def tokens(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 281, count)


def test_a_new_prefill_forgets_the_last_sequence(runtime: LlamaCppRuntime) -> None:
    first = runtime.prefill(tokens(20))
    runtime.decode(5)
    runtime.prefill(tokens(40, seed=1))
    np.testing.assert_array_equal(runtime.prefill(tokens(20)), first)


@pytest.mark.parametrize("count", [1, 127, 128, 129, 512, 513, 640])
def test_all_logits_end_with_the_last_tokens_logits(count: int, runtime: LlamaCppRuntime) -> None:
    found = runtime.prefill(tokens(count), all_logits=True)
    last = runtime.prefill(tokens(count))
    assert (found.shape, found.dtype, last.shape, last.dtype) == ((count, 320), np.float32, (320,), np.float32)
    # The batches differ in size, and with them llama.cpp's order of summation.
    np.testing.assert_allclose(found[-1], last, atol=0.2)
    assert found.std() > 1


def test_decode_continues_the_sequence(runtime: LlamaCppRuntime) -> None:
    sequence = tokens(30)
    whole = runtime.prefill(sequence, all_logits=True)
    runtime.prefill(sequence[:20])
    for index in range(20, 30):
        step = runtime.decode(int(sequence[index]))
        np.testing.assert_allclose(step, whole[index], atol=0.2)


def test_returned_logits_are_not_overwritten(runtime: LlamaCppRuntime) -> None:
    first = runtime.prefill(tokens(4))
    kept = first.copy()
    runtime.decode(7)
    np.testing.assert_array_equal(first, kept)


def test_more_tokens_than_the_context_are_refused(entry: Path) -> None:
    runtime = LlamaCppRuntime()
    runtime.load(entry, threads=1, context=10)
    with pytest.raises(InputError, match="11 more tokens do not fit: 10 of 10"):
        runtime.prefill(tokens(11))
    runtime.prefill(tokens(10))
    with pytest.raises(InputError, match="1 more tokens do not fit: 0 of 10"):
        runtime.decode(1)
    runtime.close()


def test_more_tokens_than_the_model_has_positions_are_refused(entry: Path) -> None:
    runtime = LlamaCppRuntime()
    runtime.load(entry, threads=1, context=POSITIONS + 100)
    with pytest.raises(InputError, match=f"of {POSITIONS} are left"):
        runtime.prefill(tokens(POSITIONS + 1))
    runtime.close()


@pytest.mark.parametrize("bad", [[-1], [320], []])
def test_tokens_that_are_none_are_refused(bad: list[int], runtime: LlamaCppRuntime) -> None:
    with pytest.raises(InputError):
        runtime.prefill(np.array(bad, dtype=np.int64))


def test_it_describes_what_is_in_force(entry: Path) -> None:
    runtime = LlamaCppRuntime()
    runtime.load(entry, threads=2, context=300)
    found = runtime.describe()
    assert (found["library"], found["threads"], found["threads_prefill"]) == ("llama-cpp-python", 2, 2)
    assert (found["kv_type"], found["model"]) == ("f16", "tiny")
    # 2 blocks, 2 key/value heads of 32, keys and values, two bytes each.
    assert runtime.kv_bytes(100) == 100 * 2 * 2 * 32 * 2 * 2
    assert found["kv_bytes"] == runtime.kv_bytes(found["context"])
    assert found["context"] >= 300
    runtime.close()


def test_text_and_metadata_come_from_the_file(runtime: LlamaCppRuntime) -> None:
    text = "The quick brown fox 42 \u00fc\U0001f600<|endoftext|>"
    ids = runtime.tokenize(text)
    assert runtime.detokenize(ids) == text
    assert int(ids[-1]) == 0
    assert runtime.ends_text(0)
    assert not runtime.ends_text(5)
    assert 0 not in runtime.tokenize(text, parse_special=False)
    assert runtime.chat_template() == TEMPLATE
    assert [runtime.special_token(role) for role in ("eos", "bos")] == ["<|endoftext|>", ""]
    assert runtime.metadata("general.architecture") == "llama"
    assert runtime.metadata("no.such.key") is None
    assert b"".join(runtime.piece(int(token)) for token in runtime.tokenize("\U0001f600")) == "\U0001f600".encode()


def test_loading_again_replaces_the_file(entry: Path, runtime: LlamaCppRuntime) -> None:
    before = runtime.prefill(tokens(8))
    runtime.load(entry, threads=1, context=16)
    np.testing.assert_allclose(runtime.prefill(tokens(8)), before, atol=0.2)


def test_closing_twice_is_harmless_and_a_closed_runtime_says_so(entry: Path) -> None:
    runtime = LlamaCppRuntime()
    runtime.load(entry, threads=1, context=16)
    runtime.close()
    runtime.close()
    with pytest.raises(CompressError, match="no file is loaded"):
        runtime.decode(1)


def test_what_cannot_be_loaded_is_explained(entry: Path, tmp_path: Path) -> None:
    runtime = LlamaCppRuntime()
    with pytest.raises(InputError, match="no such file"):
        runtime.load(tmp_path / "none.gguf", threads=1, context=16)
    with pytest.raises(InputError, match="threads=0"):
        runtime.load(entry, threads=0, context=16)
    cut, foreign = tmp_path / "cut.gguf", tmp_path / "foreign.gguf"
    cut.write_bytes(entry.read_bytes()[:-5000])
    foreign.write_bytes(b"not a model")
    with pytest.raises(InputError, match="corrupted or incomplete"):
        runtime.load(cut, threads=1, context=16)
    with pytest.raises(InputError, match="magic"):
        runtime.load(foreign, threads=1, context=16)


def test_llama_cpp_prints_nothing(entry: Path) -> None:
    code = (
        "import sys, pathlib, numpy\nfrom compress.runner.llamacpp import LlamaCppRuntime\n"
        "r = LlamaCppRuntime(); r.load(pathlib.Path(sys.argv[1]), 1, 16); r.prefill(numpy.arange(4)); r.close()\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(entry)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_missing_library_is_explained_with_the_command(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_import = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "llama_cpp":
            raise ImportError("No module named 'llama_cpp'")
        return plain_import(name, *arguments, **options)

    # The process-wide one stays: llama.cpp still points at its log.
    monkeypatch.setattr(llamacpp, "_library", llamacpp._library.__wrapped__)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InputError) as caught:
        LlamaCppRuntime().load(entry, threads=1, context=16)
    assert "pip install llama-cpp-python==0.3.36" in caught.value.fix
    assert "-fno-tree-dse" in caught.value.fix


BESIDE_TORCH = """
import sys
from pathlib import Path
import numpy as np, torch
from compress.runner.llamacpp import LlamaCppRuntime

runtime, prompt = LlamaCppRuntime(), np.arange(40) % 200
runtime.load(Path(sys.argv[1]), threads=1, context=64)
before = runtime.prefill(prompt)
matrix = torch.randn(256, 256, dtype=torch.bfloat16)
(matrix @ matrix).sum().item()
assert np.array_equal(runtime.prefill(prompt), before)
runtime.close()
"""


def test_torch_may_compute_in_bfloat16_between_two_steps(entry: Path) -> None:
    """On a CPU with AMX both set up the same registers, each as if it were alone in its thread."""
    command = [sys.executable, "-c", BESIDE_TORCH, str(entry)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
