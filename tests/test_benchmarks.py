"""The benchmarks on a tiny model: real runs, kept results, a table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import activations, eviction, onnx_files, quality
from exporters.onnx import OnnxExporter
from tests.benchmark import command as command_of
from tests.compress.runs import sentences
from tests.support import rounded_model, tiny_llama


def test_runs_what_is_not_done_and_prints_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(tmp_path / "model")
    command = command_of("quality.py", model, tmp_path, "--samples", "4", "--windows", "3", "--length", "32")
    runs = ["ours rtn int8-g32", "ours rotate,guided,gptq int3-g32"]
    for asked in (runs[:1], runs):
        monkeypatch.setattr("sys.argv", [*command, *(part for run in asked for part in ("--run", run))])
        quality.main()
    printed = capsys.readouterr()
    results = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [f"{r['who']} {r['method']} {r['scheme']}" for r in results] == runs
    assert printed.err.count('"kld"') == 2
    assert 0 < results[0]["kld"] < 1e-3 < results[1]["kld"]
    assert all(r["cpu_s"] > 0 and r["error"] >= 0 for r in results)
    assert "| int8-g32 | ours | rtn |" in printed.out
    assert "| int3-g32 | ours | rotate,guided,gptq |" in printed.out


def test_a_peer_without_an_environment_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(tmp_path / "model")
    (tmp_path / "text").write_text(sentences(1, 1500), encoding="utf-8")
    texts = ["--calibration", str(tmp_path / "text"), "--evaluation", str(tmp_path / "text")]
    sizes = ["--samples", "1", "--windows", "2", "--length", "16", "--out", str(tmp_path / "out")]
    run = ["--run", "llm-compressor gptq int4-g32"]
    monkeypatch.setattr("sys.argv", ["quality.py", "--model", str(model), *texts, *sizes, *run])
    with pytest.raises(SystemExit, match="give --peer llm-compressor=PYTHON"):
        quality.main()


def test_onnx_files_are_built_once_scored_and_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(tmp_path / "model")
    sizes = ["--samples", "4", "--windows", "3", "--length", "32", "--rounds", "2", "--only", "109.5MB"]
    monkeypatch.setattr("sys.argv", command_of("onnx_files.py", model, tmp_path, *sizes))
    onnx_files.main()
    row = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    folder = tmp_path / "out/ours-within-109.5MB/onnx"
    size = sum((folder / name).stat().st_size for name in ("model.onnx", "model.onnx.data"))
    assert row[:2] == ["ours within 109.5MB", f"{size / 1e6:.1f}"]
    assert 0 < float(row[2]) < 1
    assert all(float(speed) > 0 for speed in re.findall(r"[\d.]+", row[4]))


def test_eviction_prints_a_row_for_each_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(tmp_path / "model")
    (tmp_path / "text").write_text(sentences(1, 1500), encoding="utf-8")
    sizes = ["--prompt", "60", "--scored", "12", "--windows", "2"]
    texts = ["--model", str(model), "--evaluation", str(tmp_path / "text")]
    monkeypatch.setattr("sys.argv", ["eviction.py", *texts, *sizes])
    eviction.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["| 100%", "| 50%", "| 25%", "| 10%"]
    lost = [[float(cell.split(" ")[0]) for cell in row[1:]] for row in rows]
    # SnapKV drops nothing after the prompt; every method loses more where it keeps a tenth.
    assert lost[0][1] == 0
    assert all(most > least for least, most in zip(lost[0], lost[-1], strict=True))


def test_costs_of_activations_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = rounded_model(tiny_llama(tmp_path / "model"), tmp_path / "work")
    (tmp_path / "out").mkdir()
    artifact = OnnxExporter().write(model, tmp_path / "out")
    (tmp_path / "text").write_text(sentences(1, 300), encoding="utf-8")
    command = ["activations.py", "--artifact", str(artifact.path), "--text", str(tmp_path / "text")]
    found = {}
    for more in ([], ["--each", "q_proj+k_proj+v_proj"]):
        monkeypatch.setattr("sys.argv", [*command, "--tokens", "128", "--threads", "1", *more])
        activations.main()
        rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
        found |= {name: (float(kld), share) for name, kld, share in rows[1:]}
    assert found["all"][1] == "100.0%"
    parts = [cost for name, (cost, _) in found.items() if "." not in name and name != "all"]
    assert len(parts) == 5
    assert sum(parts) == pytest.approx(found["all"][0], rel=0.3)
    each = [cost for name, (cost, _) in found.items() if name.endswith(".q_proj+k_proj+v_proj")]
    assert sum(each) == pytest.approx(found["q_proj+k_proj+v_proj"][0], rel=0.3)
