"""The benchmark of caches on a tiny model, at a short context: every file with every cache is scored and timed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import kv_cache
from tests.benchmark import command as command_of
from tests.support import tiny_llama


@pytest.mark.parametrize("rounds", [0, 1])
def test_every_cache_is_scored_against_the_float_one(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(tmp_path / "model", head_dim=32, max_position_embeddings=512)
    sizes = ["--samples", "2", "--windows", "2", "--length", "96", "--rounds", str(rounds)]
    caches = ["--cache", "q8_0", "--cache", "q4_0"]
    monkeypatch.setattr("sys.argv", command_of("kv_cache.py", model, tmp_path, *sizes, *caches, words=3000))
    kv_cache.main()
    printed = capsys.readouterr().out
    rows = {cells[0]: cells[1:] for cells in re.findall(r"^\| (.*?) \| ([\d.]+) \| ([\d.]+) \|", printed, re.M)}
    assert list(rows) == ["gguf, f32", "gguf, q8_0", "gguf, q4_0", "onnx float", "onnx int8", "onnx int4"]
    kld = {name: float(cells[1]) for name, cells in rows.items()}
    assert kld["gguf, f32"] == kld["onnx float"] == 0
    assert kld["gguf, q8_0"] < kld["gguf, q4_0"]
    assert kld["onnx int8"] < kld["onnx int4"]
    taken = {name: float(cells[0]) for name, cells in rows.items()}
    # Layers, heads, keys and values, bytes of 32 numbers; llama.cpp makes room for whole multiples of 256 tokens.
    assert taken["gguf, q8_0"] == pytest.approx(256 * 2 * 2 * 2 * 34 / 1e6, abs=0.006)
    assert taken["onnx int8"] == pytest.approx(96 * 2 * 2 * 2 * 32 / 1e6, abs=0.006)
    assert ("decode, tokens/s" in printed) == (rounds == 1)
