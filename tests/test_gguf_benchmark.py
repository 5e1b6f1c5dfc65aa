"""The benchmark of GGUF types on a tiny model: both sides of every recipe are quantised and scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gguf_files, gguf_speed
from tests.benchmark import command as command_of
from tests.support import tiny_llama

RECIPE = """model: builtin:smollm2-135m
passes: [rtn: {scheme: int5-g32}]
export: [gguf]
pin: {"*.down_proj": q2_k}
"""


def test_both_sides_are_scored_on_the_same_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(tmp_path / "model", intermediate_size=256)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    sizes = ["--samples", "4", "--windows", "3", "--length", "32", "--recipe", str(tmp_path / "recipe.yaml")]
    monkeypatch.setattr("sys.argv", command_of("gguf_files.py", model, tmp_path, *sizes))
    gguf_files.main()
    printed = capsys.readouterr()
    (result,) = [json.loads(line) for line in printed.err.splitlines() if line.startswith("{")]
    assert 0 < result["ours"]["kld"] < 1
    assert 0 < result["llama.cpp"]["kld"] < 1
    assert result["ours"]["kld"] != result["llama.cpp"]["kld"]
    linears = {
        "q": 64 * 64,
        "k": 32 * 64,
        "v": 32 * 64,
        "o": 64 * 64,
        "gate": 64 * 256,
        "up": 64 * 256,
        "down": 64 * 256,
    }
    ends = 2 * 320 * 64
    bits = {name: 2.625 if name == "down" else 5.5 for name in linears}
    expected = sum(2 * size * bits[name] for name, size in linears.items()) + 8.5 * ends
    assert result["bits"] == pytest.approx(expected / (2 * sum(linears.values()) + ends), rel=1e-12)
    assert f"| {result['bits']:.3f} |" in printed.out


def test_our_file_is_as_large_as_planned_and_as_llama_cpps_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(tmp_path / "model", tie_word_embeddings=True)
    command = ["gguf_speed.py", "--model", str(model), "--out", str(tmp_path / "out"), "--threads", "1"]
    monkeypatch.setattr("sys.argv", [*command, "--rounds", "1", "--type", "Q4_0", "--type", "Q8_0"])
    gguf_speed.main()
    printed = capsys.readouterr().out
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| Q")]
    assert [cells[0] for cells in rows] == ["Q4_0", "Q8_0"]
    for cells in rows:
        assert cells[1] == cells[2] == cells[3]
        assert abs(float(cells[4]) - float(cells[5])) <= 0.01
