"""What a recipe says, as frozen records. The defaults of a recipe are the defaults of these dataclasses.

A section refuses values with ValueError, one line an offender, each ``field: message``.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from calibration.text import TextSource
from compress.fields import ByteSize
from compress.kv import CacheType, CacheTypes
from compress.patterns import assign
from compress.scheme import QuantScheme


def _default(cls: type[Any], name: str) -> Any:
    """The default of a dataclass field."""
    return next(item.default for item in fields(cls) if item.name == name)


def _below(record: Any, **minimum: int) -> list[str]:
    """A complaint for each field of ``record`` under its minimum."""
    return [
        f"{name}: must be at least {least}, got {getattr(record, name)}"
        for name, least in minimum.items()
        if getattr(record, name) < least
    ]


def _refuse(lines: Sequence[str]) -> None:
    if lines:
        raise ValueError("\n".join(lines))


@dataclass(frozen=True)
class CheckedSource(TextSource):
    """A text source whose fields fit each other."""

    USES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "builtin": (),
        "text": ("path", "encoding"),
        "jsonl": ("path", "column", "encoding", "chat_template"),
        "hub": ("name", "split", "column", "config", "chat_template"),
        "self": (),
    }
    """Which fields each source reads."""

    def __post_init__(self) -> None:
        _refuse(self.problems())

    def problems(self) -> list[str]:
        """Complaints, each ``field: message``."""
        uses = self.USES[self.source]
        lines = [f"{name}: source '{self.source}' needs it" for name in ("path", "name") if self._lacks(name)]
        for item in fields(TextSource):
            if item.name not in ("source", *uses) and getattr(self, item.name) != _default(type(self), item.name):
                users = ", ".join(source for source, names in self.USES.items() if item.name in names)
                lines.append(f"{item.name}: source '{self.source}' does not read it; sources that do: {users}")
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            lines.append(f"encoding: '{self.encoding}' is no encoding that Python knows; write utf-8 or latin-1, say")
        return lines

    def _lacks(self, name: str) -> bool:
        return name in self.USES[self.source] and not getattr(self, name)


@dataclass(frozen=True)
class Calibration(CheckedSource):
    """``samples`` windows of ``sequence_length`` tokens that the passes see.

    With ``packing`` documents are joined and cut into full windows; without, each window has one document, cut or
    padded. ``temperature`` is for the text that the model writes itself.
    """

    samples: int = 32
    sequence_length: int = 512
    seed: int = 0
    packing: bool = True
    temperature: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    """What blocks multiply in while the calibration windows go through them, and gradients back."""

    def problems(self) -> list[str]:
        """Complaints, each ``field: message``."""
        lines = super().problems() + _below(self, samples=1, sequence_length=1, seed=0)
        if not 0 < self.temperature < math.inf:
            lines.append(f"temperature: must be above 0, got {self.temperature:g}")
        elif self.source != "self" and self.temperature != 1:
            lines.append(f"temperature: source '{self.source}' does not read it; sources that do: self")
        if self.source == "self" and not self.packing:
            lines.append("packing: what the model writes itself always fills its windows")
        return lines


@dataclass(frozen=True)
class Evaluate(CheckedSource):
    """``windows`` windows of ``sequence_length`` tokens on which each artifact is compared with the model."""

    split: str = "test"
    windows: int = 16
    sequence_length: int = 512

    def problems(self) -> list[str]:
        """Complaints, each ``field: message``."""
        # One token has no next one to predict.
        lines = super().problems() + _below(self, windows=1, sequence_length=2)
        if self.source == "self":
            lines.append("source: a model is judged on text that it did not write; builtin, text, jsonl or hub")
        return lines


@dataclass(frozen=True)
class Measure:
    """How each artifact is run: tokens in, tokens out, threads, repetitions.

    ``kv_keys`` and ``kv_values`` are what llama.cpp keeps keys and values of GGUF artifacts in, for speed and quality.
    """

    prompt_tokens: int = 128
    generate_tokens: int = 64
    threads: int | Literal["auto"] = "auto"
    """auto: the CPUs that this process may use."""
    repeats: int = 3
    kv_keys: CacheType = "f16"
    kv_values: CacheType = "f16"
    window: int | None = None
    """Tokens that the cache keeps beside ``sinks`` first ones; None: all."""
    sinks: int = 4

    @property
    def cache(self) -> CacheTypes:
        """Both types of the cache."""
        return CacheTypes(self.kv_keys, self.kv_values)

    def __post_init__(self) -> None:
        lines = _below(self, prompt_tokens=1, generate_tokens=1, repeats=1, sinks=0)
        lines += [] if self.window is None else _below(self, window=1)
        _refuse(lines if self.threads == "auto" else lines + _below(self, threads=1))


@dataclass(frozen=True)
class Gates:
    """Limits that every artifact must keep; None is no limit."""

    max_kld: float | None = None
    """Mean KLD in nats."""
    min_top1: float | None = None
    """Share of positions with the model's own most likely token, 0 to 1."""
    max_size: ByteSize | None = None
    max_bits_per_weight: float | None = None
    min_decode_tps: float | None = None
    """Generated tokens per second."""
    max_peak_rss: ByteSize | None = None

    NEEDS: ClassVar[Mapping[str, str]] = {
        "max_kld": "evaluate",
        "min_top1": "evaluate",
        "min_decode_tps": "measure",
        "max_peak_rss": "measure",
    }
    """Which step finds the number that a gate looks at; the others need none."""

    def __post_init__(self) -> None:
        limits = {item.name: getattr(self, item.name) for item in fields(self)}
        lines = [f"{name}: must be above 0, got {limit}" for name, limit in limits.items() if (limit or 1) < 0]
        lines += [f"{name}: must be above 0, got 0" for name, limit in limits.items() if limit == 0]
        if self.min_top1 is not None and self.min_top1 > 1:
            lines.append(f"min_top1: a share from 0 to 1, got {self.min_top1}")
        _refuse(lines)


@dataclass(frozen=True)
class Step:
    """One pass or exporter: its name, and the frozen dataclass instance that carries its arguments."""

    name: str
    value: Any
    where: str = field(default="", compare=False)
    """File, line and key path, for messages."""


@dataclass(frozen=True)
class Recipe:
    """What to do with which model. Equal recipes ask for the same; where they were written does not count."""

    model: str
    passes: tuple[Step, ...]
    export: tuple[Step, ...]
    calibration: Calibration = Calibration()
    measure: Measure | None = Measure()
    """None: switched off."""
    evaluate: Evaluate | None = Evaluate()
    """None: switched off."""
    gates: Gates = Gates()
    ignore: tuple[str, ...] = ()
    """Patterns of layers that stay in floating point."""
    pin: Mapping[str, QuantScheme | None] = field(default_factory=dict)
    """Pattern -> scheme that its layers get whatever the passes plan; None: they stay in floating point."""
    where: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Pattern -> file, line and key path, for messages."""

    def pinned(self, layers: Sequence[str]) -> dict[str, QuantScheme | None]:
        """Layer -> the scheme that ``ignore`` and ``pin`` fix, None for floating point; other layers are absent.

        InputError names each pattern that matches no layer and each layer that two patterns disagree about.
        """
        return assign({**dict.fromkeys(self.ignore), **self.pin}, layers, self.where)
