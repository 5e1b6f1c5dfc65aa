"""Numbers with units that a person reads."""

from __future__ import annotations

from compress.report import Measurement


def size(count: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def duration(seconds: float) -> str:
    """Seconds as ms, s, or min and s."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def quantity(item: Measurement) -> str:
    """The value of a measurement with a unit for people."""
    if item.unit in ("B", "bytes"):
        return size(item.value)
    if item.unit == "s":
        return duration(item.value)
    # Three digits, and never an exponent for a number of four.
    digits = f"{item.value:.3g}" if abs(item.value) < 999.5 else f"{item.value:.0f}"
    return f"{digits} {item.unit}".rstrip()
