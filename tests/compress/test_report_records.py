"""Reports survive JSON, hold only numbers that JSON knows, have the promised fields, and read well as Markdown."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.errors import InputError
from compress.markdown import render
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
    decode,
)
from compress.units import duration, quantity, size


def measurement(name: str, value: float, unit: str) -> Measurement:
    return Measurement(name, value, unit, 5, 0.04, "cpu of the test", "measured: five runs")


def performance() -> Performance:
    memory = {name: measurement(name, 1e6, "bytes") for name in ("weights", "kv", "activations", "runtime")}
    return Performance(
        measurement("load_s", 0.3, "s"),
        measurement("ttft_s", 0.05, "s"),
        measurement("prefill_tps", 2345.6, "tokens/s"),
        measurement("decode_tps", 98.76, "tokens/s"),
        measurement("tpot_p50_s", 0.0101, "s"),
        measurement("tpot_p95_s", 0.0121, "s"),
        measurement("peak_rss_bytes", 237_000_000, "bytes"),
        memory,
        measurement("roofline_fraction", 0.74, ""),
        threads=2,
        foreign_load=0.1,
    )


def full_report() -> Report:
    gptq = (
        LayerRecord("model.layers.0.mlp.up_proj", "int4-g32", 1234, 4096, 0.01, 2e-3, 6e-3),
        LayerRecord("model.layers.0.mlp.down_proj", "int8-g32", 999, 16, 0.1, 1e-3, 1e-3, "damping raised | twice"),
        LayerRecord("lm_head", "int8-g32", 77),
    )
    mixed = (
        LayerRecord("model.layers.0.mlp.up_proj", "int4-g32", 1234, sensitivity={"int4-g32": 0.1, "int8-g32": 0.0}),
    )
    quality = Quality(0.0812, 0.9, 0.87, 15.5, 14.25, 8192, 16)
    parity = Parity(211, (), "gguf-py", 1e-5, 8e-3, 1024, exact=True, kld_as_run=2e-3)
    return Report(
        recipe={"model": "builtin:smollm2-135m", "passes": [{"gptq": {"damping": 0.01}}], "gates": None},
        model={
            "source": "builtin:smollm2-135m",
            "name": "SmolLM2",
            "weights": 134_515_008,
            "linear_weights": 106_168_320,
            "bytes": 538_000_000,
            "tied_head": True,
            "quantized_share": 0.987,
            "float_layers": ["lm_head"],
        },
        environment={"cpu": "some | cpu", "threads": 2},
        calibration={"origin": "builtin", "requested_samples": 32, "obtained_samples": 30, "sequence_length": 512},
        evaluation={"origin": "builtin", "requested_samples": 16, "obtained_samples": 16, "sequence_length": 512},
        passes=(
            PassRecord("mixed", {"target_bits": 4.3, "choices": ["int4-g32"]}, 1.5, mixed, (), {"achieved_bits": 4.29}),
            PassRecord("gptq", {"scheme": "int4-g32"}, 20.0, gptq, ("a note",)),
        ),
        artifacts=(
            ArtifactRecord("gguf", "gguf", 119_000_000, 4.512, parity, quality, performance()),
            ArtifactRecord("onnx", "onnx", 120_000_000, 4.6, None, None, None),
        ),
        gates=(GateRecord("max_kld", "gguf", 0.2, 0.0812, True), GateRecord("max_size", "onnx", 1e8, 1.2e8, False)),
        timings={"prepare": 0.4, "blocks": 75.0},
        warnings=("the text is short",),
    )


def test_a_report_survives_json() -> None:
    report = full_report()
    again = Report.from_json(report.to_json())
    assert again == report
    assert isinstance(again.passes[1].layers, tuple)
    assert isinstance(again.artifacts[0].performance, Performance)
    assert isinstance(again.artifacts[0].performance.memory["kv"], Measurement)
    assert again.to_json() == report.to_json()


def test_a_report_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(full_report().to_json(), encoding="utf-8")
    assert Report.read(path) == full_report()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["timings", "quality", "layer", "summary"])
def test_numbers_that_json_does_not_know_are_refused(value: float, place: str) -> None:
    report = full_report()
    artifact, record = report.artifacts[0], report.passes[0]
    assert artifact.quality is not None
    changed = {
        "timings": {"timings": {"blocks": value}},
        "quality": {
            "artifacts": (dataclasses.replace(artifact, quality=dataclasses.replace(artifact.quality, kld_mean=value)),)
        },
        "layer": {
            "passes": (
                dataclasses.replace(record, layers=(dataclasses.replace(record.layers[0], output_error=value),)),
            )
        },
        "summary": {"passes": (dataclasses.replace(record, summary={"achieved_bits": value}),)},
    }[place]
    with pytest.raises(ValueError, match="JSON compliant"):
        dataclasses.replace(report, **changed).to_json()  # type: ignore[arg-type]


def keys(value: Any) -> set[str]:
    assert isinstance(value, dict)
    return set(value)


def test_the_schema_has_every_field_that_the_documentation_promises() -> None:
    report = json.loads(full_report().to_json())
    assert report["schema"] == 1
    assert {"recipe", "model", "environment", "calibration", "passes", "artifacts", "gates"} <= keys(report)
    layer = report["passes"][1]["layers"][0]
    assert {"layer", "scheme", "bytes", "tokens", "damping", "output_error", "rounding_error", "fallback"} <= keys(
        layer
    )
    artifact = report["artifacts"][0]
    assert {"format", "path", "bytes", "bits_per_weight", "parity", "quality", "performance"} == keys(artifact)
    assert {"kld_mean", "kld_p99", "top1_agreement", "perplexity", "perplexity_reference"} <= keys(artifact["quality"])
    timed = {"load_s", "ttft_s", "prefill_tps", "decode_tps", "tpot_p50_s", "tpot_p95_s", "peak_rss_bytes"}
    assert timed | {"memory", "roofline_fraction"} <= keys(artifact["performance"])
    assert {"weights", "kv", "activations", "runtime"} == keys(artifact["performance"]["memory"])
    for name in (*timed, "roofline_fraction"):
        assert {"name", "value", "unit", "runs", "spread", "device", "how"} == keys(artifact["performance"][name])
    assert {"gate", "artifact", "limit", "value", "passed"} == keys(report["gates"][0])


@pytest.mark.parametrize("text", ['{"schema": 2}', "{}", "[]", "3"])
def test_a_report_of_another_schema_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="this version reads schema 1"):
        Report.from_json(text)


numbers = st.floats(allow_nan=False, allow_infinity=False)
layers = st.builds(
    LayerRecord,
    st.text(),
    st.text(),
    st.integers(0),
    st.integers(0),
    st.none() | numbers,
    st.none() | numbers,
    st.none() | numbers,
    st.none() | st.text(),
    st.none() | st.dictionaries(st.text(), numbers),
)


@settings(deadline=None)
@given(layers)
def test_every_layer_record_survives_json(record: LayerRecord) -> None:
    assert decode(LayerRecord, json.loads(json.dumps(dataclasses.asdict(record)))) == record


@pytest.mark.parametrize(
    ("mismatched", "kld", "passed"),
    [((), 0.001, True), ((), 0.01, True), ((), 0.011, False), (("a",), 0.0, False), ((), float("nan"), False)],
)
def test_parity_passes_only_if_everything_matches(mismatched: tuple[str, ...], kld: float, passed: bool) -> None:
    assert Parity(3, mismatched, "reader", kld, 0.01, 10, exact=True, kld_as_run=1.0).passed is passed


# --- for a reader


def test_the_markdown_says_what_the_report_says() -> None:
    text = render(full_report())
    for part in (
        "# SmolLM2, compressed",
        "134.5 M weights (106.2 M in linear layers), 538.0 MB",
        "98.7% of them are quantised; left in floating point: `lm_head`.",
        "> **Warning:** the text is short",
        "| `gguf/` | 119.0 MB | 4.512 | 0.0812 | 0.900 | 87.0% | 15.50 (model: 14.25) | 98.8 tokens/s | 237.0 MB |",
        "| `onnx/` | 120.0 MB | 4.600 | - | - | - | - | - | - |",
        "211 weights read back by gguf-py",
        "| max_size | onnx | 1e+08 | 1.2e+08 | **failed** |",
        "| prefill_tps | 2346 tokens/s | 5 | 4% | measured: five runs |",
        "gptq(scheme=int4-g32), 3 layers, 20.0 s.",
        "Schemes: 1 x int4-g32, 2 x int8-g32.",
        "median 100%, best 33%, worst 100%",
        "| calibration | builtin | 30 | 32 | 512 |",
        "| total | 75.4 s |",
        "some \\| cpu",
    ):
        assert part in text


def test_every_table_row_has_as_many_cells_as_its_head() -> None:
    width = 0
    for line in render(full_report()).splitlines():
        cells = line.replace("\\|", "").count("|")
        if not line.startswith("|"):
            width = 0
        elif width == 0:
            width = cells
        else:
            assert cells == width, line


def test_a_report_without_artifacts_gates_or_passes_renders() -> None:
    empty = dataclasses.replace(full_report(), artifacts=(), gates=(), passes=(), calibration={}, timings={})
    text = render(empty)
    assert "## Gates" not in text
    assert "## Pass" not in text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (537_512, "537.5 kB"),
        (1e6, "1.0 MB"),
        (1.25e9, "1.25 GB"),
        (-2e3, "-2.0 kB"),
    ],
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0101, "10.1 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (99.9, "99.9 s"),
        (119.6, "2 min 0 s"),
        (754, "12 min 34 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (98.76, "tokens/s", "98.8 tokens/s"),
        (2345.6, "tokens/s", "2346 tokens/s"),
        (999.6, "tokens/s", "1000 tokens/s"),
        (0.74, "", "0.74"),
        (0.0101, "s", "10.1 ms"),
        (237e6, "bytes", "237.0 MB"),
    ],
)
def test_quantities(value: float, unit: str, text: str) -> None:
    assert quantity(Measurement("x", value, unit)) == text
