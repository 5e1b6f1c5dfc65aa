"""Performance of real artifacts in their real runtimes, in fresh processes; never an absolute time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from compress.errors import CompressError, InputError
from compress.models.topology import describe
from compress.protocols import Artifact
from compress.report import Performance, decode
from compress.runner import quality
from compress.runner.bandwidth import Bandwidth
from compress.runner.measure import bench, summarise
from compress.runner.memory import Phase, Resident
from compress.runner.observe import ForeignLoad, Found, Run
from compress.runner.process import Job, PerformanceSettings, run_job
from tests.compress.exported import FORMATS, export
from tests.support import fake_quantized, mean_kld, rounded_model

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def quiet_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spinning threads collapse on a machine that does other work at the same time."""
    monkeypatch.setenv("EDGEPRESS_NO_SPIN", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Artifact]]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, export(folder)


SETTINGS = PerformanceSettings(prompt_tokens=24, generate_tokens=6, repeats=3, weight_bytes=50_000)


@pytest.mark.parametrize("format", FORMATS)
def test_every_number_says_how_it_was_taken(tiny: tuple[Path, dict[str, Artifact]], format: str) -> None:
    found = bench(tiny[1][format], SETTINGS, threads=1)
    assert decode(Performance, json.loads(json.dumps(found, default=vars))) == found
    assert found.threads == 1
    assert found.foreign_load >= 0
    numbers = [found.load_s, found.ttft_s, found.prefill_tps, found.decode_tps, found.tpot_p50_s, found.tpot_p95_s]
    numbers += [found.peak_rss_bytes, found.roofline_fraction, *found.memory.values()]
    for number in numbers:
        assert number.how.startswith(("measured: ", "computed: "))
        assert number.device.endswith(", 1 threads")
        assert number.value > 0 or number.name in ("weights", "activations")
    # llama.cpp says what it has reserved.
    computed = {"onnx": {"kv", "roofline_fraction"}, "gguf": {"roofline_fraction"}}
    assert {number.name for number in numbers if number.how.startswith("computed")} == computed[format]
    assert (found.decode_tps.runs, found.load_s.runs) == (3, 1)
    assert found.decode_tps.spread is not None
    assert "warm-up run is left out" in found.decode_tps.how
    assert found.tpot_p50_s.value <= found.tpot_p95_s.value
    assert found.ttft_s.value >= 24 / found.prefill_tps.value * 0.99


@pytest.mark.parametrize("format", FORMATS)
def test_the_cache_is_counted_by_its_shape(tiny: tuple[Path, dict[str, Artifact]], format: str) -> None:
    found = bench(tiny[1][format], SETTINGS, threads=1)
    layers, heads, head_size = 2, 2, 16
    tokens, width = {"onnx": (30, 4), "gguf": (256, 2)}[format]  # llama.cpp rounds a context up to 256
    assert found.memory["kv"].value == 2 * layers * heads * head_size * tokens * width


@pytest.mark.parametrize("format", FORMATS)
def test_the_parts_of_memory_add_up_to_the_generation_peak(tiny: tuple[Path, dict[str, Artifact]], format: str) -> None:
    memory = bench(tiny[1][format], SETTINGS, threads=1).memory
    parts = sum(memory[name].value for name in ("runtime", "weights", "kv", "activations"))
    assert parts == pytest.approx(memory["generation_peak"].value, rel=0.01)
    assert memory["steady"].value <= memory["generation_peak"].value * 1.01


@pytest.mark.parametrize("format", FORMATS)
def test_logits_in_the_child_match_the_fake_quantised_model(
    tiny: tuple[Path, dict[str, Artifact]], format: str, tmp_path: Path
) -> None:
    folder, artifacts = tiny
    model = fake_quantized(rounded_model(folder / "model", tmp_path / "work"))
    tokens = np.random.default_rng(0).integers(0, 281, (2, 40))
    with torch.no_grad():
        parity = model(torch.from_numpy(tokens)).logits.numpy()
    rng = np.random.default_rng(1)
    reference = parity + rng.normal(0, 0.5, parity.shape).astype(np.float32)
    for name, array in (("tokens", tokens), ("parity", parity[:1]), ("reference", reference)):
        np.save(tmp_path / f"{name}.npy", array)
    result = quality.evaluate(
        artifacts[format],
        tmp_path / "tokens.npy",
        threads=1,
        reference=tmp_path / "reference.npy",
        parity=tmp_path / "parity.npy",
    )
    assert result.parity_kld is not None
    assert 0 < result.parity_kld < 0.01
    assert result.parity_tokens == 40
    assert result.quality is not None
    expected = mean_kld(torch.from_numpy(reference), torch.from_numpy(parity))
    assert result.quality.kld_mean == pytest.approx(expected, rel=0.1)
    assert (result.quality.windows, result.quality.tokens) == (2, 80)


def test_a_prompt_comes_from_a_file_and_must_fit(tiny: tuple[Path, dict[str, Artifact]], tmp_path: Path) -> None:
    file = tmp_path / "tokens.npy"
    artifact = tiny[1]["onnx"]
    job = Job("onnx", str(artifact.path / artifact.entry), 1, PerformanceSettings(8, 2, 1, str(file)))
    with pytest.raises(InputError, match="no such file"):
        run_job(job)
    np.save(file, np.arange(6))
    with pytest.raises(InputError, match="6 tokens, but prompt_tokens is 8"):
        run_job(job)
    np.save(file, np.arange(316, 324))
    with pytest.raises(InputError, match="vocabulary of 320"):
        run_job(job)
    np.save(file, np.arange(8).reshape(2, 4))
    assert run_job(job).performance is not None


def test_a_damaged_artifact_names_the_file(tmp_path: Path) -> None:
    for format in FORMATS:
        entry = tmp_path / f"model.{format}"
        entry.write_bytes(b"not a model" * 100)
        with pytest.raises(CompressError) as caught:
            bench(Artifact(format, tmp_path, entry.name), SETTINGS, threads=1)
        assert caught.value.where == str(entry)


FRESH = """
import sys, numpy as np
from pathlib import Path
from compress import registry
runtime = registry.load("runtimes", sys.argv[1])()
runtime.load(Path(sys.argv[2]), 1, 30)
for _ in range(4):
    runtime.prefill(np.random.default_rng(0).integers(0, 320, 24))
    for token in range(6):
        runtime.decode(token)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Artifact]]:
    """One model whose weights outweigh everything else, in three widths."""
    folder = tmp_path_factory.mktemp("sizes")
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    found = {"int4": export(folder / "int4", "int4-g32", **shape)}
    layers = describe(json.loads((folder / "int4/model/config.json").read_text())).all_linears()
    found["int8"] = export(folder / "int8", "int8-g32", **shape)
    found["float"] = export(folder / "float", plan=dict.fromkeys(layers), **shape)
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_fewer_bits_need_less_memory_by_about_the_difference_of_the_weights(
    sizes: dict[str, dict[str, Artifact]], format: str
) -> None:
    peaks, stored, weights = {}, {}, {}
    for name, artifacts in sizes.items():
        artifact = artifacts[format]
        found = bench(artifact, SETTINGS, threads=1)
        peaks[name] = found.peak_rss_bytes.value
        weights[name] = found.memory["weights"].value
        stored[name] = sum(file.stat().st_size for file in artifact.path.iterdir())
        entry = str(artifact.path / artifact.entry)
        plain = subprocess.run(
            [sys.executable, "-c", FRESH, format, entry], capture_output=True, text=True, check=True, cwd=ROOT
        )
        assert peaks[name] == pytest.approx(int(plain.stdout) * 1024, rel=0.12)
    assert peaks["float"] > peaks["int8"] > peaks["int4"]
    assert weights["float"] > weights["int8"] > weights["int4"]
    # On a CPU with AMX llama.cpp keeps the mapped file and a repacked copy of its weights.
    copies = 2 if format == "gguf" else 1
    assert 0.6 < (peaks["float"] - peaks["int4"]) / (stored["float"] - stored["int4"]) < 1.4 * copies


def run(prefill: float, steps: tuple[float, ...]) -> Run:
    return Run(prefill, prefill + 0.5, steps)


def test_medians_percentiles_and_spreads_of_known_runs(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"x" * 600)
    (tmp_path / "model.onnx.data").write_bytes(b"x" * 400)
    found = Found(
        imported=Resident(100, 110),
        loading=Phase(900, "clock"),
        touched=Resident(400, 400),
        generating=Phase(700, "clock"),
        steady=Resident(650, 700),
        kv_bytes=30,
        mapped_bytes=50,
        load_s=2.0,
        cached=0.25,
        runs=[run(1.0, (0.1, 0.3)), run(2.0, (0.2, 0.2)), run(4.0, (0.5, 0.3))],
        foreign_load=0.5,
        described={"threads": 3},
    )
    settings = PerformanceSettings(prompt_tokens=8, generate_tokens=2, repeats=3)
    got = summarise(found, settings, Bandwidth(10_000.0, 3, 1, 1, 0.0), tmp_path / "model.onnx")
    assert (got.ttft_s.value, got.ttft_s.spread) == (2.5, pytest.approx(3 / 2.5))
    assert (got.prefill_tps.value, got.prefill_tps.spread) == (4.0, pytest.approx(6 / 4))
    assert got.decode_tps.value == pytest.approx(5.0)
    assert got.tpot_p50_s.value == pytest.approx(0.25)
    assert got.tpot_p95_s.value == pytest.approx(np.percentile([0.1, 0.3, 0.2, 0.2, 0.5, 0.3], 95))
    assert (got.peak_rss_bytes.value, got.threads, got.foreign_load) == (900, 3, 0.5)
    assert {name: number.value for name, number in got.memory.items()} == {
        "runtime": 100,
        "weights": 270,
        "kv": 30,
        "activations": 300,
        "load_peak": 900,
        "steady": 650,
        "generation_peak": 700,
    }
    assert "50 bytes of it are pages of the weight files" in got.memory["weights"].how
    assert got.roofline_fraction.value == pytest.approx(5.0 * 1000 / 10_000)
    assert "upper bound" in got.roofline_fraction.how
    assert "25% of the files" in got.load_s.how


def test_foreign_load_sees_other_processes_and_not_this_one() -> None:
    busy = "import time\nend = time.time() + 60\nwhile time.time() < end: pass"
    other = subprocess.Popen([sys.executable, "-c", busy])
    try:
        time.sleep(0.3)
        watch = ForeignLoad()
        time.sleep(1.5)
        with_other = watch.cpus()
        assert with_other > 0.3
    finally:
        other.kill()
        other.wait()
    watch, start = ForeignLoad(), time.process_time()
    while time.process_time() - start < 1.0:
        pass
    own = time.process_time() - start
    before = watch._start
    now = watch._now()
    # This process's own second of work is no foreign load: what is busy beyond it is.
    assert (now[1] - before[1]) - watch.cpus() * (now[0] - before[0]) == pytest.approx(own, abs=0.25)
