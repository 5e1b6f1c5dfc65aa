from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from compress import terminal
from compress.artifacts import Inspection
from compress.protocols import StoredTensor
from compress.report import (
    ArtifactRecord,
    GateRecord,
    LayerRecord,
    Measurement,
    Parity,
    PassRecord,
    Performance,
    Quality,
    Report,
)

QUALITY = Quality(0.0123, 0.2, 0.951, 20.5, 20.25, 8176, 16)
PERFORMANCE = Performance(
    load_s=Measurement("load_s", 0.25, "s", 3, 0.1),
    ttft_s=Measurement("ttft_s", 1.5, "s", 3),
    prefill_tps=Measurement("prefill_tps", 400.0, "tok/s", 3),
    decode_tps=Measurement("decode_tps", 112.4, "tok/s", 3, 0.05, "cpu"),
    tpot_p50_s=Measurement("tpot_p50_s", 0.0089, "s", 3),
    tpot_p95_s=Measurement("tpot_p95_s", 0.0101, "s", 3),
    peak_rss_bytes=Measurement("peak_rss_bytes", 237e6, "bytes"),
    memory={"weights": Measurement("weights", 97_300_000, "bytes", how="computed")},
    roofline_fraction=Measurement("roofline_fraction", 0.73, ""),
    threads=2,
    foreign_load=0.25,
)
PARITY = Parity(211, (), "gguf-py", 0.001, 0.008, 100, exact=False, kld_as_run=0.001)


def report() -> Report:
    layers = (LayerRecord("a", "int4-g32", 10), LayerRecord("b", "int4-g32", 10, fallback="too few tokens"))
    artifacts = (
        ArtifactRecord("onnx", "onnx", 97_300_000, 4.501, PARITY, QUALITY, PERFORMANCE),
        ArtifactRecord("gguf", "gguf", 900, 4.5, dataclasses.replace(PARITY, mismatched=("x",)), None, None),
    )
    gates = (GateRecord("max_kld", "onnx", 0.01, 0.0123, False), GateRecord("max_size", "gguf", 1000, 900, True))
    passes = (PassRecord("gptq", {}, 75.2, layers, (), {"achieved": 4.98765}),)
    return Report({}, {}, {}, {}, {}, passes, artifacts, gates, {}, ("few [calibration] tokens",))


def test_a_report_is_shown_with_units_and_nothing_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show_report(report())
    rows = {line.split()[0]: " ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["gptq"] == "gptq 75.2 s 2 1 achieved 4.988"
    assert rows["onnx"] == "onnx 97.3 MB 4.501 ok 0.0123 95.1% 20.50 (model 20.25) 112 tok/s 1.5 s 237.0 MB"
    assert rows["gguf"] == "gguf 900 B 4.500 FAILED - - - - - -"
    assert rows["max_kld"] == "max_kld onnx 0.01 0.0123 FAILED"
    assert rows["max_size"] == "max_size gguf 1000 900 passed"
    assert rows["warning:"] == "warning: few [calibration] tokens"


def test_speed_and_quality_are_shown_with_what_they_rest_on(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show_performance(PERFORMANCE)
    terminal.show_quality(QUALITY)
    shown = capsys.readouterr().out
    for text in ("8.9 ms", "112 tok/s", "97.3 MB", "computed", "2 threads on cpu", "0.25 CPUs", "95.1%", "16 windows"):
        assert text in shown


def test_tensors_are_listed_with_their_bits_and_added_up(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = (
        StoredTensor("a", "Q4_0", (64, 32), 1152, "model.layers.0.mlp.up_proj"),
        StoredTensor("b", "Q4_0", (32, 32), 576, "lm_head"),
        StoredTensor("c", "F32", (), 4),
        StoredTensor("d", "F32", (0, 5), 0),
    )
    terminal.show_tensors(Inspection("gguf", "x.gguf", tensors, file_bytes=3072))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a", "Q4_0", "64x32", "4.50", "1.2", "kB"] in lines
    assert ["c", "F32", "32.00", "4", "B"] in lines
    assert ["d", "F32", "0x5", "-", "0", "B"] in lines
    assert ["Q4_0", "2", "4.50", "1.7", "kB"] in lines
    assert ["4", "tensors,", "1.7", "kB", "of", "data"] in lines
    assert lines[-2][:3] == ["linear", "layers:", "4.500"]
    assert lines[-1][:4] == ["files:", "3.1", "kB,", "8.000"]


def test_files_of_unknown_layers_have_no_bits_per_weight(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show_tensors(Inspection("gguf", "x.gguf", (StoredTensor("a", "F32", (2,), 8),), file_bytes=3072))
    assert capsys.readouterr().out.splitlines()[-1] == "1 tensors, 8 B of data"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (120_449_999, "120.4 MB"), (2.5e9, "2.50 GB")]
)
def test_sizes_are_decimal(count: float, text: str) -> None:
    assert terminal.size(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.0021, "2.1 ms"), (1.25, "1.2 s"), (125.4, "2 min 5 s")])
def test_times_have_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert terminal.duration(seconds) == text


def test_progress_off_a_terminal_is_a_line_at_each_end(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress(quiet=False)("gptq", 3) as advance:
        advance(1)
        advance(2)
    captured = capsys.readouterr()
    assert captured.out == ""
    first, last = captured.err.splitlines()
    assert first == "gptq: 3 to do"
    assert last.startswith("gptq: 3 of 3 done in ")


def test_quiet_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress(quiet=True)("gptq", 3) as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")


def test_bars_may_nest_and_end_with_their_step() -> None:
    screen = io.StringIO()
    bars = terminal.Bars(Console(file=screen, force_terminal=True, width=100, markup=False, highlight=False))
    with bars("outer [bold]", 2) as outer, bars("inner", 5) as inner:
        inner(5)
        outer(1)
    with pytest.raises(KeyError), bars("broken", 1):
        raise KeyError
    with bars("after", 1) as advance:
        advance(1)
    shown = screen.getvalue()
    assert all(f"{label}: " in shown for label in ("outer [bold]", "inner", "after"))
    assert "broken: " not in shown
