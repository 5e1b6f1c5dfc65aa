"""From a recipe to measured artifacts. Read :func:`run` first: the house in one function."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from compress.blocks import compress_blocks
from compress.coverage import coverage_warnings, token_coverage
from compress.errors import CompressError
from compress.fields import plain
from compress.findings import activation_warnings, check_gates, describe_model, environment, pass_warnings
from compress.fingerprint import fingerprint
from compress.journal import Journal
from compress.markdown import render
from compress.models.checkpoint import scan_finite
from compress.patterns import match_layers
from compress.prepare import Prepared, prepare
from compress.proof import REPORT_IT, Evidence, gather_evidence, prove
from compress.protocols import Exporter, Planner
from compress.recipe import Recipe, dump_yaml, to_dict
from compress.report import ArtifactRecord, PassRecord, Report, decode
from compress.room import check_room
from compress.scheme import FLOAT
from compress.session import CompressedModel, Progress, Session, no_progress
from compress.store import preserve, restore
from compress.texts import text_windows, written_windows
from compress.workspace import check_free, workspace, write_manifest


def run(
    recipe: Recipe, out: Path, *, overwrite: bool = False, resume: bool = False, progress: Progress = no_progress
) -> Report:
    """Compress the recipe's model, write every artifact into ``out``, prove and measure each, and say what was found.

    ``resume`` goes on with a run into ``out`` that was interrupted, if there is one. Raises InputError for what the
    user can mend, ParityError if an artifact is not what the passes chose; ``out`` is as it was then. A failed gate is
    in the report; the caller decides what to do about it.
    """
    clock = Clock()
    check_free(out, overwrite, resume)
    with clock("prepare"), progress("preparing", 3) as advance:
        prepared, session, remarks = prepare(recipe)
        torch.set_num_threads(prepared.threads)
        advance(1)
        calibration, evaluation = text_windows(prepared)
        needed = check_room(prepared, session.plan, out)
        advance(2)
    with clock("scan weights"), progress("scanning weights", len(prepared.original.files)) as advance:
        weights = scan_finite(prepared.original, advance)
    if prepared.writes_text:
        with clock("write calibration text"):
            calibration = written_windows(prepared, evaluation, progress)
    identity = fingerprint(prepared, calibration, weights)
    with workspace(out, overwrite, needed["disk_bytes"], resume=resume, fingerprint=identity) as work:
        folder = work.result
        session = prepared.session(work.state, calibration.tokens, progress, calibration.real, work.scratch)
        passes = run_passes(prepared, session, work.journal, clock)
        require_plan(session)
        model = prepared.compressed(session.store, session.float_activations)
        with clock("reference logits"):
            evidence = gather_evidence(prepared, model, evaluation.tokens, work.scratch, progress)
        artifacts = [export(prepared, model, step.value, folder, evidence, clock, progress) for step in recipe.export]
        coverage = token_coverage(prepared.spec, prepared.shapes, passes)
        report = Report(
            recipe=to_dict(recipe),
            model=describe_model(prepared, model.schemes),
            environment=environment(prepared.threads),
            calibration={**calibration.audit, **({} if coverage is None else {"coverage": coverage})},
            evaluation=evaluation.audit,
            passes=tuple(passes),
            artifacts=tuple(artifacts),
            gates=tuple(check_gates(recipe, artifacts)),
            timings=clock.seconds,
            warnings=(
                *remarks,
                *calibration.warnings,
                *evaluation.warnings,
                *coverage_warnings(coverage),
                *pass_warnings(passes),
                *activation_warnings(artifacts),
            ),
        )
        (folder / "report.json").write_text(report.to_json() + "\n", encoding="utf-8")
        (folder / "report.md").write_text(render(report), encoding="utf-8")
        (folder / "recipe.yaml").write_text(dump_yaml(recipe), encoding="utf-8")
        write_manifest(folder)
    return report


def run_passes(prepared: Prepared, session: Session, journal: Journal, clock: Clock) -> list[PassRecord]:
    """What was done to the checkpoint; then planners over the whole model, then the other passes block by block."""
    records = list(prepared.rewrites)
    for number, step in enumerate(prepared.of_scope("model")):
        with clock(step.name):
            records.append(run_planner(session, step.value, f"pass {number} {step.name}", journal))
    steps = prepared.of_scope("block")
    with clock("blocks"):
        done = compress_blocks(session, [step.value for step in steps], journal)
    for step, mine in zip(steps, done, strict=True):
        records.append(PassRecord(step.name, plain(step.value), mine.seconds, tuple(mine.layers)))
    return records


def run_planner(session: Session, planner: Planner, name: str, journal: Journal) -> PassRecord:
    """What a pass over the whole model did, now or in an earlier process; the session then has what it hands on."""
    file = session.store.root.with_name(f"{name.replace(' ', '-')}.safetensors")
    found = journal.get(name)
    if found is not None:
        restore(session, found["session"], file)
        return decode(PassRecord, found["record"])
    record = planner.apply(session)
    journal.add(name, {"session": preserve(session, file), "record": asdict(record)}, [file])
    return record


def require_plan(session: Session) -> None:
    """CompressError if a layer did not become what the plan says: nothing may stay in floating point unsaid."""
    plan, found = session.plan, session.store.schemes
    wrong = [
        f"{layer}: planned {plan.get(layer, FLOAT)}, became {found.get(layer, FLOAT)}"
        for layer in session.shapes
        if plan.get(layer) != found.get(layer)
    ]
    if wrong:
        raise CompressError("\n".join(wrong), where="passes", fix=REPORT_IT)


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


@dataclass(frozen=True)
class Plan:
    """What a run would do, as far as it is known without running a pass."""

    model: dict[str, Any]
    passes: list[str]
    rules: list[dict[str, Any]]
    """What ``ignore`` and ``pin`` say, and which layers each of them names."""
    layers: list[dict[str, Any]]
    needed: dict[str, int]
    calibration: dict[str, Any]
    evaluation: dict[str, Any]
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def plan(
    recipe: Recipe,
    out: Path | None = None,
    *,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress = no_progress,
) -> Plan:
    """Check what :func:`run` checks before it reads the weights, and say what it would do; writes nothing."""
    if out is not None:
        check_free(out, overwrite, resume)
    with progress("preparing", 1) as advance:
        prepared, session, remarks = prepare(recipe)
        calibration, evaluation = text_windows(prepared)
        advance(1)
    rules = list(pin_rules(prepared))
    owner = {layer: f"{rule['rule']} {rule['pattern']}" for rule in reversed(rules) for layer in rule["layers"]}
    layers = []
    for layer, shape in prepared.shapes.items():
        scheme = session.plan.get(layer)
        beside = 0 if scheme is None else session.residual_bits(layer)
        bytes_ = (prepared.stored_bits(scheme, shape) + beside) // 8
        by = owner.get(layer, "default" if layer in prepared.pinned else "passes")
        layers.append(
            {"layer": layer, "shape": list(shape), "scheme": str(scheme or FLOAT), "set_by": by, "bytes": bytes_}
        )
    return Plan(
        model=describe_model(prepared, session.plan),
        passes=[step.name for step in prepared.passes],
        rules=rules,
        layers=layers,
        needed=check_room(prepared, session.plan, out or Path()),
        calibration=calibration.audit,
        evaluation=evaluation.audit,
        warnings=[*remarks, *calibration.warnings, *evaluation.warnings],
    )


def pin_rules(prepared: Prepared) -> Iterator[dict[str, Any]]:
    """Each pattern of the recipe: what it fixes, and the layers that it names."""
    recipe = prepared.recipe
    schemes = {**dict.fromkeys(recipe.ignore), **recipe.pin}
    for pattern, layers in match_layers(schemes, list(prepared.shapes)).items():
        rule = "ignore" if pattern in recipe.ignore else "pin"
        scheme = str(schemes[pattern] or FLOAT)
        yield {"rule": rule, "pattern": pattern, "scheme": scheme, "count": len(layers), "layers": layers}


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
