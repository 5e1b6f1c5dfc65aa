"""The final norm's gains, in the graph of a rotated model whose head is its embedding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compress.rotation import Rotation
from exporters.onnx.writer import GraphWriter


def turned_gains(writer: GraphWriter, rotation: Rotation, hidden: str, gains: NDArray[np.float32]) -> str:
    """``hidden R^T diag(gains) R`` for ``hidden`` [batch, sequence, width] and R = diag(signs) (F1 x F2 x ...).

    The signs cancel. The factors are small, and reshaping sorts the channels for each: R itself is never formed.
    """
    width, orders = rotation.width, [len(factor) for factor in rotation.factors]
    # Two factors leave the channels as the next two want them.
    inner = orders if len(orders) == 2 else [width]
    value, shape = _factors(writer, rotation, hidden, "gains.back", [width], back=True)
    if shape != inner:
        value = writer.node("Reshape", [value, writer.constant([0, -1, *inner])], "gains.back")
    stored = writer.floats("gains.vector", gains.reshape(inner))
    value = writer.node("Mul", [value, stored], "gains.multiplied")
    value, shape = _factors(writer, rotation, value, "gains.turned", inner, back=False)
    if shape == [width]:
        return value
    return writer.node("Reshape", [value, writer.constant([0, -1, width])], "gains.turned")


def _factors(
    writer: GraphWriter, rotation: Rotation, value: str, name: str, shape: list[int], back: bool
) -> tuple[str, list[int]]:
    """``value``, whose last axes have ``shape``, times every factor or (``back``) its transpose; their shape then."""
    behind = rotation.width
    for number, factor in enumerate(rotation.factors):
        order = len(factor)
        behind //= order
        # What it mixes are columns, where nothing lies behind them, and rows in front of those.
        last = behind == 1
        matrix = (factor if last == (not back) else factor.T).float().numpy()
        stored = writer.floats(f"{name}.factor.{number}", np.ascontiguousarray(matrix))
        if not last and shape != [order, behind]:
            shape = [order, behind]
            value = writer.node("Reshape", [value, writer.constant([0, -1, *shape])], f"{name}.{number}.rows")
        value = writer.node("MatMul", [value, stored] if last else [stored, value], f"{name}.{number}")
    return value, shape
