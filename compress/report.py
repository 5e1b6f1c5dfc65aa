"""What a run found, as frozen records: JSON out, JSON in. Schema 1."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.errors import InputError

SCHEMA = 1


@dataclass(frozen=True)
class Measurement:
    """One number with everything needed to trust it.

    ``spread`` is (max - min) / median over ``runs``; None where it was taken once. ``how`` says what was done,
    and starts with "measured" or "computed".
    """

    name: str
    value: float
    unit: str
    runs: int = 1
    spread: float | None = None
    device: str = ""
    how: str = "measured"


@dataclass(frozen=True)
class LayerRecord:
    """What one pass did to one layer. Errors are mean squared output errors relative to the output's power.

    Of ``autoround`` they are those of the block that the layer is in, relative to what the block adds.
    """

    layer: str
    scheme: str
    bytes: int
    tokens: int = 0
    damping: float | None = None
    output_error: float | None = None
    rounding_error: float | None = None
    fallback: str | None = None
    sensitivity: dict[str, float] | None = None
    """scheme -> predicted rise in KLD (nats a token) if this layer alone were rounded by it."""
    alpha: float | None = None
    """The exponent of the scales on this layer's inputs (Lin et al. 2024, eq. 5); None: they were not scaled."""


@dataclass(frozen=True)
class PassRecord:
    """What one pass did. ``summary`` holds the few numbers of that pass (target, achieved, ...)."""

    name: str
    arguments: dict[str, Any]
    seconds: float
    layers: tuple[LayerRecord, ...] = ()
    notes: tuple[str, ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Parity:
    """Does the file hold what the passes chose, and does the runtime compute it?

    ``tensors`` were read back by ``reader`` and compared bit for bit with what the passes chose.
    ``kld_mean`` (nats) compares the file's logits with the fake-quantised torch model over ``tokens`` positions:
    without rounding activations if ``exact``, else as the runtime runs the file. ``kld_as_run`` is the latter in any
    case: what is left there is what the runtime's 8-bit activations cost.
    """

    tensors: int
    mismatched: tuple[str, ...]
    reader: str
    kld_mean: float
    kld_limit: float
    tokens: int
    exact: bool
    kld_as_run: float

    @property
    def passed(self) -> bool:
        """Whether every tensor matched and the divergence is within its limit (NaN is not)."""
        return not self.mismatched and self.kld_mean <= self.kld_limit


@dataclass(frozen=True)
class Quality:
    """The artifact against the unquantised model on the evaluation windows. KLD in nats, over all positions."""

    kld_mean: float
    kld_p99: float
    top1_agreement: float
    perplexity: float
    perplexity_reference: float
    tokens: int
    windows: int


@dataclass(frozen=True)
class Performance:
    """What the artifact's own runtime needed, in a fresh process."""

    load_s: Measurement
    ttft_s: Measurement
    prefill_tps: Measurement
    decode_tps: Measurement
    tpot_p50_s: Measurement
    tpot_p95_s: Measurement
    peak_rss_bytes: Measurement
    memory: dict[str, Measurement]
    roofline_fraction: Measurement
    threads: int
    foreign_load: float
    """CPUs that other processes kept busy while this was measured; near 0 on a quiet machine."""


@dataclass(frozen=True)
class ArtifactRecord:
    """One artifact, proven and measured. ``bytes`` is every file under ``path``."""

    format: str
    path: str
    bytes: int
    bits_per_weight: float
    parity: Parity | None
    quality: Quality | None
    performance: Performance | None


@dataclass(frozen=True)
class GateRecord:
    """One gate of the recipe against one artifact."""

    gate: str
    artifact: str
    limit: float
    value: float
    passed: bool


@dataclass(frozen=True)
class Report:
    """Everything a run found. ``timings`` are wall seconds per step."""

    recipe: dict[str, Any]
    model: dict[str, Any]
    environment: dict[str, Any]
    calibration: dict[str, Any]
    evaluation: dict[str, Any]
    passes: tuple[PassRecord, ...]
    artifacts: tuple[ArtifactRecord, ...]
    gates: tuple[GateRecord, ...]
    timings: dict[str, float]
    warnings: tuple[str, ...] = ()
    schema: int = SCHEMA

    def to_json(self) -> str:
        """The report as indented JSON; NaN and infinities are an error (they are not JSON)."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what :meth:`to_json` wrote; InputError for a report of another schema."""
        content = json.loads(text)
        schema = content.get("schema") if isinstance(content, dict) else None
        if schema != SCHEMA:
            raise InputError(f"a report of schema {schema}; this version reads schema {SCHEMA}")
        return decode(cls, content)

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read ``report.json``."""
        return cls.from_json(path.read_text(encoding="utf-8"))


T = typing.TypeVar("T")


def decode(kind: type[T], value: Any) -> T:
    """Rebuild a record of frozen dataclasses, tuples and dicts from plain JSON values."""
    return typing.cast(T, _decode(kind, value))


def _decode(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _decode(next(a for a in arguments if a is not type(None)), value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return typing.cast(Any, kind)(**{name: _decode(hints[name], item) for name, item in value.items()})
    if origin is tuple:
        return tuple(_decode(arguments[0], item) for item in value)
    if origin is dict:
        return {key: _decode(arguments[1], item) for key, item in value.items()}
    return value
