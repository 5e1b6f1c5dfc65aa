"""``report.md``: the report for a reader, every number from the records of ``report.json``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from compress.report import ArtifactRecord, Measurement, PassRecord, Performance, Report
from compress.units import duration, quantity, size

WORST_LAYERS = 5
FLOAT_LAYERS = 10
EXPERTS_SHOWN = 16


def render(report: Report) -> str:
    """The whole report as Markdown."""
    return "\n".join(_lines(report)).rstrip() + "\n"


def _lines(report: Report) -> Iterator[str]:
    model = report.model
    yield f"# {model['name']}, compressed"
    yield ""
    yield (
        f"{model['weights'] / 1e6:.1f} M weights ({model['linear_weights'] / 1e6:.1f} M in linear layers), "
        f"{size(model['bytes'])} at the source `{model['source']}`. "
        f"{model['quantized_share']:.1%} of them are quantised{_left_in_float(model['float_layers'])}."
    )
    for warning in report.warnings:
        yield f"\n> **Warning:** {warning}"
    yield from _section("Artifacts", _artifacts(report.artifacts))
    yield from _section("Gates", _gates(report))
    for artifact in report.artifacts:
        if artifact.performance is not None:
            yield from _section(f"Speed and memory: {artifact.format}", _performance(artifact.performance))
    for record in report.passes:
        yield from _section(f"Pass: {record.name}", _pass(record))
    yield from _section("Text", _text(report))
    times = [(step, duration(seconds)) for step, seconds in report.timings.items()]
    total = sum(report.timings.values())
    yield from _section("Where the time went", _table(("step", "time"), [*times, ("total", duration(total))]))
    rows = [(key, str(value)) for key, value in report.environment.items()]
    yield from _section("Environment", _table(("", ""), rows))


def _left_in_float(layers: Sequence[str]) -> str:
    if not layers:
        return ""
    named = ", ".join(f"`{layer}`" for layer in layers[:FLOAT_LAYERS])
    more = f" and {len(layers) - FLOAT_LAYERS} more" if len(layers) > FLOAT_LAYERS else ""
    return f"; left in floating point: {named}{more}"


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    body = list(lines)
    if body:
        yield from ("", f"## {title}", "", *body)


def _artifacts(artifacts: Sequence[ArtifactRecord]) -> Iterator[str]:
    columns = (
        "",
        "size",
        "bits per weight",
        "KLD mean",
        "KLD p99",
        "same top token",
        "perplexity",
        "decode",
        "peak memory",
    )
    rows = []
    for item in artifacts:
        quality, performance = item.quality, item.performance
        judged = ("-", "-", "-", "-")
        if quality is not None:
            judged = (
                f"{quality.kld_mean:.4f}",
                f"{quality.kld_p99:.3f}",
                f"{quality.top1_agreement:.1%}",
                f"{quality.perplexity:.2f} (model: {quality.perplexity_reference:.2f})",
            )
        speed = ("-", "-") if performance is None else _speed(performance)
        rows.append((f"`{item.path}/`", size(item.bytes), f"{item.bits_per_weight:.3f}", *judged, *speed))
    yield from _table(columns, rows)
    yield ""
    for item in artifacts:
        if item.parity is not None:
            parity = item.parity
            yield (
                f"- {item.format}: {parity.tensors} weights read back by {parity.reader}, all equal to what the passes "
                f"chose; logits within {parity.kld_mean:.2g} nats of the quantised torch model over {parity.tokens} "
                f"tokens{' with fp32 activations' if parity.exact else ''} (limit {parity.kld_limit:g})"
                + (f"; the runtime's 8-bit activations cost {parity.kld_as_run:.2g}." if parity.exact else ".")
            )


def _speed(performance: Performance) -> tuple[str, str]:
    return quantity(performance.decode_tps), quantity(performance.peak_rss_bytes)


def _gates(report: Report) -> Iterator[str]:
    rows = [
        (gate.gate, gate.artifact, f"{gate.limit:g}", f"{gate.value:.4g}", "passed" if gate.passed else "**failed**")
        for gate in report.gates
    ]
    yield from _table(("gate", "artifact", "limit", "value", ""), rows)


def _performance(performance: Performance) -> Iterator[str]:
    items = (
        performance.load_s,
        performance.ttft_s,
        performance.prefill_tps,
        performance.decode_tps,
        performance.tpot_p50_s,
        performance.tpot_p95_s,
        performance.peak_rss_bytes,
        *performance.memory.values(),
        performance.roofline_fraction,
    )
    yield from _table(("", "value", "runs", "spread", "how"), [_measurement(item) for item in items])
    yield ""
    yield f"{performance.threads} threads; other processes kept {performance.foreign_load:.2f} CPUs busy meanwhile."


def _measurement(item: Measurement) -> tuple[str, ...]:
    spread = "" if item.spread is None else f"{item.spread:.0%}"
    return (item.name, quantity(item), str(item.runs), spread, item.how)


def _pass(record: PassRecord) -> Iterator[str]:
    arguments = ", ".join(f"{key}={_text_of(value)}" for key, value in record.arguments.items())
    yield f"{record.name}({arguments}), {len(record.layers)} layers, {duration(record.seconds)}."
    short = {key: value for key, value in record.summary.items() if not _long(value)}
    if short:
        yield ""
        yield from _table(("", ""), [(key, _text_of(value)) for key, value in short.items()])
    counts: dict[str, int] = {}
    for layer in record.layers:
        counts[layer.scheme] = counts.get(layer.scheme, 0) + 1
    if counts:
        yield ""
        yield "Schemes: " + ", ".join(f"{count} x {scheme}" for scheme, count in counts.items()) + "."
    judged = [layer for layer in record.layers if layer.output_error is not None and layer.rounding_error]
    if judged:
        better = sorted((layer.output_error or 0.0) / (layer.rounding_error or 1.0) for layer in judged)
        yield ""
        yield (
            f"Output error against plain rounding: median {better[len(better) // 2]:.0%}, "
            f"best {better[0]:.0%}, worst {better[-1]:.0%}. Largest errors:"
        )
        yield ""
        worst = sorted(judged, key=lambda layer: -(layer.output_error or 0.0))[:WORST_LAYERS]
        rows = [
            (layer.layer, layer.scheme, str(layer.tokens), f"{layer.output_error:.2e}", f"{layer.rounding_error:.2e}")
            for layer in worst
        ]
        yield from _table(("layer", "scheme", "tokens", "output error", "plain rounding"), rows)


def _text(report: Report) -> Iterator[str]:
    columns = ("", "origin", "windows obtained", "asked for", "tokens each")
    rows = []
    for name, audit in (("calibration", report.calibration), ("evaluation", report.evaluation)):
        if "origin" in audit:
            counts = (str(audit[key]) for key in ("obtained_samples", "requested_samples", "sequence_length"))
            rows.append((name, str(audit["origin"]), *counts))
    yield from _table(columns, rows)
    calibration = report.calibration
    if "overlap_with_evaluation" in calibration:
        yield ""
        yield " ".join(_audit(calibration))
    if "coverage" in calibration:
        yield from _coverage(calibration["coverage"])


def _audit(calibration: Mapping[str, Any]) -> Iterator[str]:
    """What a reader should know of the calibration text beside its size."""
    yield (
        f"Calibration: {calibration['obtained_tokens']} tokens of {calibration['requested_tokens']} asked for; "
        f"{calibration['overlap_with_evaluation']:.2%} of the evaluation text is in it."
    )
    if not calibration["packing"]:
        yield (
            f"Each window is one document, of {calibration['shortest']} to {calibration['longest']} tokens; "
            f"{calibration['documents_truncated']} were longer and lost {calibration['tokens_dropped']} tokens."
        )
    if calibration["dropped"]:
        kinds = (f"{count} {kind.replace('_', ' ')}" for kind, count in calibration["dropped"].items())
        yield f"Dropped: {', '.join(kinds)}."


def _coverage(coverage: Mapping[str, Any]) -> Iterator[str]:
    """Tokens against twice the columns: of layers that every token passes, and of experts."""
    rows = []
    for row in coverage["layers"]:
        named = ", ".join(f"`{name}`" for name in row["layers"])
        numbers = _numbers(row, "count", "columns", "tokens", "needed")
        rows.append((named, *numbers, "yes" if row["enough"] else "**no**"))
    yield ""
    yield from _table(("layers", "number", "input columns", "tokens seen", "2 x columns", "enough"), rows)
    experts = [
        (*_numbers(row, "block", "experts", "min", "median", "max", "needed"), _short(row["short"]))
        for row in coverage["experts"]
    ]
    yield ""
    columns = ("block", "experts", "fewest tokens", "median", "most", "2 x columns", "experts with fewer (tokens)")
    yield from _table(columns, experts)


def _numbers(row: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple(f"{row[key]:g}" for key in keys)


def _short(experts: Mapping[str, int]) -> str:
    fewest = sorted(experts.items(), key=lambda item: item[1])
    more = f" and {len(fewest) - EXPERTS_SHOWN} more" if len(fewest) > EXPERTS_SHOWN else ""
    return ", ".join(f"{expert} ({tokens})" for expert, tokens in fewest[:EXPERTS_SHOWN]) + more


def _long(value: object) -> bool:
    return isinstance(value, dict) and len(value) > 8


def _text_of(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text_of(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text_of, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield "| " + " | ".join(columns) + " |"
        yield "|" + " --- |" * len(columns)
        for row in rows:
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
