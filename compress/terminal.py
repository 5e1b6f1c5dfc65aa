"""What people see: progress bars, tables, units. Progress goes to stderr, results to stdout."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from compress.units import duration, quantity, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

    from compress.artifacts import Inspection
    from compress.protocols import StoredTensor
    from compress.report import ArtifactRecord, PassRecord, Performance, Quality, Report
    from compress.runner.providers import Operator, Provider
    from compress.session import Advance, Progress

WIDE = 200
"""Columns for output that no terminal shows: nothing is cut off in a log."""


def progress(quiet: bool) -> Progress:
    """Bars on a terminal, a line at the start and end of each step elsewhere, nothing when quiet."""
    from compress.session import no_progress

    if quiet:
        return no_progress
    console = _console(stderr=True)
    return Bars(console) if console.is_terminal else _plain_lines


def show_report(report: Report) -> None:
    """The report of a run as tables: passes, artifacts, gates; then its warnings."""
    passes = [_pass_row(record) for record in report.passes]
    show_rows("Passes", ("pass", "time", "layers", "fell back", "summary"), passes)
    columns = (
        "artifact",
        "size",
        "bits/weight",
        "parity",
        "KLD",
        "top-1",
        "perplexity",
        "decode",
        "first token",
        "peak",
    )
    show_rows("Artifacts", columns, [_artifact_row(record) for record in report.artifacts])
    gates = [
        (gate.gate, gate.artifact, f"{gate.limit:g}", f"{gate.value:g}", "passed" if gate.passed else "FAILED")
        for gate in report.gates
    ]
    show_rows("Gates", ("gate", "artifact", "limit", "value", ""), gates)
    if floats := report.model.get("float_layers"):
        click.echo(f"{len(floats)} layers stay in floating point; report.json names them")
    for warning in report.warnings:
        click.echo(f"warning: {warning}")


def show_performance(performance: Performance) -> None:
    """Speed and memory of one artifact, each number with its runs and spread."""
    numbers = [
        performance.load_s,
        performance.ttft_s,
        performance.prefill_tps,
        performance.decode_tps,
        performance.tpot_p50_s,
        performance.tpot_p95_s,
        performance.peak_rss_bytes,
        *performance.memory.values(),
        performance.roofline_fraction,
    ]
    rows = [
        (item.name, quantity(item), str(item.runs), "" if item.spread is None else f"{item.spread:.0%}", item.how)
        for item in numbers
    ]
    show_rows("Performance", ("what", "value", "runs", "spread", "how"), rows)
    click.echo(f"{performance.threads} threads on {performance.decode_tps.device or 'this machine'}")
    click.echo(f"other processes kept {performance.foreign_load:.2f} CPUs busy meanwhile")


def show_quality(quality: Quality) -> None:
    """The artifact against the model it was made from."""
    rows = [
        ("KLD, mean", f"{quality.kld_mean:.4g} nats"),
        ("KLD, 99th percentile", f"{quality.kld_p99:.4g} nats"),
        ("same most likely token", f"{quality.top1_agreement:.1%}"),
        ("perplexity", f"{quality.perplexity:.4g}"),
        ("perplexity of the model", f"{quality.perplexity_reference:.4g}"),
        ("tokens scored", f"{quality.tokens} in {quality.windows} windows"),
    ]
    show_rows("Quality", ("what", "value"), rows)


def show_tensors(found: Inspection) -> None:
    """Every tensor of an artifact or checkpoint, what each type takes, and the bits that a weight takes."""
    rows = [
        (item.name, item.type, "x".join(map(str, item.shape)), _per_weight([item]), size(item.bytes))
        for item in found.tensors
    ]
    show_rows("Tensors", ("tensor", "type", "shape", "bits", "size"), rows)
    types: dict[str, list[StoredTensor]] = {}
    for item in found.tensors:
        types.setdefault(item.type, []).append(item)
    by_type = [
        (kind, str(len(items)), _per_weight(items), size(sum(item.bytes for item in items)))
        for kind, items in types.items()
    ]
    show_rows("By type", ("type", "tensors", "bits", "size"), by_type)
    click.echo(f"{len(found.tensors)} tensors, {size(sum(item.bytes for item in found.tensors))} of data")
    if found.linear_bits is not None:
        click.echo(f"linear layers: {found.linear_bits:.3f} bits a weight, scales and zero points included")
    if found.file_bits is not None:
        click.echo(f"files: {size(found.file_bytes)}, {found.file_bits:.3f} bits for each weight of the model")


def show_providers(found: Sequence[Provider]) -> None:
    """How many nodes each execution provider takes, by whose word, and what each of them leaves to the CPU."""
    rows = []
    for item in found:
        products = [row for row in item.operators if "MatMul" in row.operator]
        counts = [_taken(operators, item.refuses) for operators in (item.operators, products)]
        rows.append((item.name, *counts, item.how, item.remark))
    columns = ("provider", "nodes taken", "matrix products", "how this is known", "remark")
    show_rows("Execution providers", columns, rows)
    words = {"left": "left to the CPU", "if": "taken if", "unknown": "not known"}
    left: dict[tuple[str, ...], list[str]] = {}
    for item in found:
        for row in item.operators:
            if row.verdict != "taken":
                left.setdefault((item.name, words[row.verdict], row.why), []).append(f"{row.operator} {row.nodes}")
    rows = [(*reason, ", ".join(operators)) for reason, operators in left.items()]
    show_rows("Not simply taken", ("provider", "", "why", "operators and their nodes"), rows)


def _taken(operators: Sequence[Operator], refused: bool) -> str:
    counts = {verdict: sum(row.nodes for row in operators if row.verdict == verdict) for verdict in ("taken", "if")}
    maybe = f", {counts['if']} more perhaps" if counts["if"] else ""
    return "none" if refused else f"{counts['taken']} of {sum(row.nodes for row in operators)}{maybe}"


def _per_weight(items: Sequence[StoredTensor]) -> str:
    """Bits that one element takes."""
    elements = sum(math.prod(item.shape) for item in items)
    return f"{8 * sum(item.bytes for item in items) / elements:.2f}" if elements else "-"


def show_record(title: str, record: Mapping[str, Any]) -> None:
    """A record of plain values: single values as rows, each list of records as a table of its own."""
    tables = {key: value for key, value in record.items() if _is_table(value)}
    rows = [(key, _cell(value)) for key, value in record.items() if key not in tables]
    show_rows(title, ("", ""), rows)
    for key, items in tables.items():
        columns = list(dict.fromkeys(name for item in items for name in item))
        show_rows(key, columns, [[_cell(item.get(name)) for name in columns] for item in items])


def show_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """One table; nothing where there are no rows."""
    if not rows:
        return
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = _console()
    console.print(table)
    console.print()


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    # Names such as passes[0] are no markup, and numbers need no colours.
    console = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDE
    return console


def _pass_row(record: PassRecord) -> tuple[str, ...]:
    fallbacks = sum(layer.fallback is not None for layer in record.layers)
    return (record.name, duration(record.seconds), str(len(record.layers)), str(fallbacks), _cell(record.summary))


def _artifact_row(record: ArtifactRecord) -> tuple[str, ...]:
    parity = "-" if record.parity is None else "ok" if record.parity.passed else "FAILED"
    head = (record.format, size(record.bytes), f"{record.bits_per_weight:.3f}", parity)
    quality, performance = record.quality, record.performance
    judged: tuple[str, ...] = ("-", "-", "-")
    if quality is not None:
        perplexity = f"{quality.perplexity:.2f} (model {quality.perplexity_reference:.2f})"
        judged = (f"{quality.kld_mean:.4f}", f"{quality.top1_agreement:.1%}", perplexity)
    if performance is None:
        return (*head, *judged, "-", "-", "-")
    measured = (performance.decode_tps, performance.ttft_s, performance.peak_rss_bytes)
    return (*head, *judged, *map(quantity, measured))


def _is_table(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, Mapping | list | tuple) and not value):
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Bars:
    """One bar for each running step; a finished step leaves a line with its time."""

    def __init__(self, console: Console) -> None:
        from rich import progress as bars

        columns = (bars.TextColumn("{task.description}", markup=False), bars.BarColumn(), bars.MofNCompleteColumn())
        times = (bars.TimeElapsedColumn(), bars.TimeRemainingColumn())
        self._bars: RichProgress = bars.Progress(*columns, *times, console=console, transient=True)

    @contextmanager
    def __call__(self, label: str, total: int) -> Iterator[Advance]:
        """Show one step of ``total`` parts while it runs."""
        if not self._bars.tasks:
            self._bars.start()
        start = time.monotonic()
        task = self._bars.add_task(label, total=total)
        try:
            yield lambda steps: self._bars.advance(task, steps)
            self._bars.console.print(f"{label}: {duration(time.monotonic() - start)}")
        finally:
            self._bars.remove_task(task)
            if not self._bars.tasks:
                self._bars.stop()


@contextmanager
def _plain_lines(label: str, total: int) -> Iterator[Advance]:
    start, done = time.monotonic(), 0

    def advance(steps: int) -> None:
        nonlocal done
        done += steps

    click.echo(f"{label}: {total} to do", err=True)
    yield advance
    click.echo(f"{label}: {done} of {total} done in {duration(time.monotonic() - start)}", err=True)
