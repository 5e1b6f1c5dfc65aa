"""From a recipe to measured artifacts. Read :func:`run` first: the house in one function."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from calibration.windows import Windows, overlap
from compress import __version__
from compress.blocks import compress_blocks
from compress.fields import plain
from compress.markdown import render
from compress.models.checkpoint import scan_finite
from compress.prepare import PARITY_WINDOWS, Prepared, check_room, prepare, token_windows
from compress.proof import Evidence, gather_evidence, prove
from compress.protocols import Exporter
from compress.recipe import Evaluate, Recipe, dump_yaml, to_dict
from compress.report import ArtifactRecord, GateRecord, PassRecord, Report
from compress.runner.measure import cpu_model
from compress.session import CompressedModel, Progress, Session, no_progress
from compress.workspace import check_free, workspace, write_manifest

WORK = "work"
ACTIVATION_KLD = 8e-3
"""KLD (nats) that 8-bit activations may cost before the report warns."""
OVERLAP_WARNING = 0.01
"""Share of the evaluation text found in the calibration text from which the report warns."""


def run(recipe: Recipe, out: Path, *, overwrite: bool = False, progress: Progress = no_progress) -> Report:
    """Compress the recipe's model, write every artifact into ``out``, prove and measure each, and say what was found.

    Raises InputError for what the user can mend (nothing is written then), ParityError if an artifact is not what the
    passes chose. A failed gate is in the report; the caller decides what to do about it.
    """
    clock = Clock()
    check_free(out, overwrite)
    with clock("prepare"), progress("preparing", 3) as advance:
        prepared, _, remarks = prepare(recipe)
        torch.set_num_threads(prepared.threads)
        advance(1)
        calibration, evaluation = text_windows(prepared)
        needed = check_room(prepared, out)
        advance(2)
    with clock("scan weights"), progress("scanning weights", len(prepared.checkpoint.files)) as advance:
        scan_finite(prepared.checkpoint, advance)
    with workspace(out, overwrite, needed["disk_bytes"]) as folder:
        session = prepared.session(folder / WORK, calibration.tokens, progress)
        passes = run_passes(prepared, session, clock)
        model = prepared.compressed(session.store)
        with clock("reference logits"):
            evidence = gather_evidence(prepared, model, evaluation.tokens, folder / WORK, progress)
        artifacts = [export(prepared, model, step.value, folder, evidence, clock, progress) for step in recipe.export]
        shutil.rmtree(folder / WORK)
        report = Report(
            recipe=to_dict(recipe),
            model=describe_model(prepared),
            environment=environment(prepared.threads),
            calibration=calibration.audit,
            evaluation=evaluation.audit,
            passes=tuple(passes),
            artifacts=tuple(artifacts),
            gates=tuple(check_gates(recipe, artifacts)),
            timings=clock.seconds,
            warnings=(
                *remarks,
                *calibration.warnings,
                *evaluation.warnings,
                *pass_warnings(passes),
                *activation_warnings(artifacts),
            ),
        )
        (folder / "report.json").write_text(report.to_json() + "\n", encoding="utf-8")
        (folder / "report.md").write_text(render(report), encoding="utf-8")
        (folder / "recipe.yaml").write_text(dump_yaml(recipe), encoding="utf-8")
        write_manifest(folder)
    return report


def run_passes(prepared: Prepared, session: Session, clock: Clock) -> list[PassRecord]:
    """Planners over the whole model, then the other passes block by block."""
    records = []
    for step in prepared.of_scope("model"):
        with clock(step.name):
            records.append(step.value.apply(session))
    steps = prepared.of_scope("block")
    with clock("blocks"):
        done = compress_blocks(session, [step.value for step in steps])
    for step, mine in zip(steps, done, strict=True):
        records.append(PassRecord(step.name, plain(step.value), mine.seconds, tuple(mine.layers)))
    return records


def export(
    prepared: Prepared,
    model: CompressedModel,
    exporter: Exporter,
    folder: Path,
    evidence: Evidence,
    clock: Clock,
    progress: Progress,
) -> ArtifactRecord:
    """Write one artifact, prove it, measure it."""
    target = folder / exporter.format
    target.mkdir()
    with clock(f"write {exporter.format}"), progress(f"writing {exporter.format}", 1) as advance:
        artifact = exporter.write(model, target)
        advance(1)
    with clock(f"prove and measure {exporter.format}"):
        return prove(prepared, model, exporter, artifact, evidence, progress)


def text_windows(prepared: Prepared) -> tuple[Windows, Windows]:
    """Calibration and evaluation windows; the audit says how much of the second occurs in the first."""
    recipe, checkpoint = prepared.recipe, prepared.checkpoint
    evaluate = recipe.evaluate
    if evaluate is None:
        # Parity is checked in every run, so a little text is needed all the same.
        length = min(Evaluate().sequence_length, prepared.spec.max_positions)
        evaluate = Evaluate(windows=PARITY_WINDOWS, sequence_length=length)
    evaluation = token_windows(checkpoint, evaluate, "evaluation")
    if not prepared.needs_tokens:
        return Windows(evaluation.tokens[:0], {"used": False}), evaluation
    calibration = token_windows(checkpoint, recipe.calibration, "calibration")
    shared = overlap(calibration.tokens, evaluation.tokens)
    warnings = calibration.warnings
    if shared > OVERLAP_WARNING:
        warnings = (
            *warnings,
            f"{shared:.0%} of the evaluation text is in the calibration text: quality looks too good",
        )
    audit = {**calibration.audit, "used": True, "overlap_with_evaluation": shared}
    return Windows(calibration.tokens, audit, warnings), evaluation


@dataclass(frozen=True)
class Plan:
    """What a run would do, as far as it is known without running a pass."""

    model: dict[str, Any]
    passes: list[str]
    layers: list[dict[str, Any]]
    needed: dict[str, int]
    calibration: dict[str, Any]
    evaluation: dict[str, Any]
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def plan(recipe: Recipe, progress: Progress = no_progress) -> Plan:
    """Check everything that :func:`run` checks before it works, and say what it would do; writes nothing."""
    with progress("preparing", 1) as advance:
        prepared, session, remarks = prepare(recipe)
        calibration, evaluation = text_windows(prepared)
        advance(1)
    layers = []
    for layer, shape in prepared.shapes.items():
        scheme = session.plan.get(layer)
        rule = "pinned" if layer in prepared.pinned else "passes"
        bytes_ = shape[0] * shape[1] * 4 if scheme is None else scheme.stored_bits(shape) // 8
        scheme_text = "float" if scheme is None else str(scheme)
        layers.append({"layer": layer, "shape": list(shape), "scheme": scheme_text, "set_by": rule, "bytes": bytes_})
    return Plan(
        model=describe_model(prepared),
        passes=[step.name for step in prepared.passes],
        layers=layers,
        needed=check_room(prepared, Path()),
        calibration=calibration.audit,
        evaluation=evaluation.audit,
        warnings=[*remarks, *calibration.warnings, *evaluation.warnings],
    )


GATES: dict[str, tuple[str, int]] = {
    "max_kld": ("quality.kld_mean", 1),
    "min_top1": ("quality.top1_agreement", -1),
    "max_size": ("bytes", 1),
    "max_bits_per_weight": ("bits_per_weight", 1),
    "min_decode_tps": ("performance.decode_tps.value", -1),
    "max_peak_rss": ("performance.peak_rss_bytes.value", 1),
}
"""Gate -> (the number in an artifact's record, 1 for an upper limit or -1 for a lower one)."""


def check_gates(recipe: Recipe, artifacts: Sequence[ArtifactRecord]) -> Iterator[GateRecord]:
    """Every gate of the recipe against every artifact."""
    for gate, (where, sign) in GATES.items():
        limit = getattr(recipe.gates, gate)
        if limit is None:
            continue
        for artifact in artifacts:
            value: Any = artifact
            for name in where.split("."):
                value = getattr(value, name)
            yield GateRecord(gate, artifact.format, float(limit), float(value), sign * value <= sign * limit)


def pass_warnings(passes: Sequence[PassRecord]) -> Iterator[str]:
    """One line for each kind of fallback that a pass had to take."""
    for record in passes:
        reasons: dict[str, list[str]] = {}
        for layer in record.layers:
            if layer.fallback is not None:
                reasons.setdefault(layer.fallback, []).append(layer.layer)
        for reason, layers in reasons.items():
            shown = ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")
            yield f"{record.name}: {reason} ({shown})"


def activation_warnings(artifacts: Sequence[ArtifactRecord]) -> Iterator[str]:
    """A line for each artifact that rounding activations to 8 bits hurts more than it should."""
    for artifact in artifacts:
        if artifact.parity is not None and artifact.parity.kld_as_run > ACTIVATION_KLD:
            cost = f"{artifact.parity.kld_as_run:.3g} nats (usual: below {ACTIVATION_KLD:g})"
            yield f"{artifact.format}: the runtime's 8-bit activations cost {cost}; smaller groups cost less"


def describe_model(prepared: Prepared) -> dict[str, Any]:
    """The model, for the report."""
    weights = {layer: rows * columns for layer, (rows, columns) in prepared.shapes.items()}
    linears = sum(weights[layer] for layer in prepared.spec.all_linears())
    return {
        "source": prepared.recipe.model,
        "name": prepared.checkpoint.name,
        "family": prepared.spec.family.name,
        "blocks": prepared.spec.layers,
        "weights": sum(weights.values()),
        "linear_weights": linears,
        "tied_head": prepared.spec.tied,
        "bytes": prepared.checkpoint.bytes,
    }


LIBRARIES = ("torch", "transformers", "onnx", "onnxruntime", "gguf", "numpy", "datasets", "optimum")


def environment(threads: int) -> dict[str, Any]:
    """What the run ran on: without it no number means much."""
    return {
        "edgepress": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "threads": threads,
        "torch_threads": torch.get_num_threads(),
        **{name: version(name) for name in LIBRARIES},
    }


@dataclass
class Clock:
    """Wall seconds of each step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        """Add the time that the context lasts to ``step``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - started
