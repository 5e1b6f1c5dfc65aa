"""The stream of hidden states turned by the graph itself, for a rotated model whose head is its embedding."""

from __future__ import annotations

import numpy as np

from compress.rotation import Rotation
from exporters.onnx.writer import GraphWriter


class StreamWriter:
    """Multiplies hidden states [batch, sequence, hidden] by R = diag(signs) (F1 x F2 x ...), or by its inverse.

    Never by R itself: the factors are small, and reshaping sorts the channels for each of them.
    """

    def __init__(self, rotation: Rotation, writer: GraphWriter) -> None:
        self._rotation = rotation
        self._writer = writer
        self._signs = writer.floats("stream.signs", rotation.signs.float().numpy())

    def turn(self, hidden: str) -> str:
        """``hidden R``."""
        return self._factors(self._writer.node("Mul", [hidden, self._signs], "stream.signed"), "stream.turned", False)

    def turn_back(self, hidden: str) -> str:
        """``hidden R^T``."""
        turned = self._factors(hidden, "stream.back", True)
        return self._writer.node("Mul", [turned, self._signs], "stream.unsigned")

    def _factors(self, value: str, name: str, back: bool) -> str:
        writer, behind = self._writer, self._rotation.width
        for number, factor in enumerate(self._rotation.factors):
            order = len(factor)
            behind //= order
            # What it mixes are columns, where nothing lies behind them, and rows in front of those.
            last = behind == 1
            matrix = (factor if last == (not back) else factor.T).float().numpy()
            stored = writer.floats(f"{name}.factor.{number}", np.ascontiguousarray(matrix))
            if last:
                value = writer.node("MatMul", [value, stored], f"{name}.{number}")
            else:
                rows = writer.node("Reshape", [value, writer.constant([0, -1, order, behind])], f"{name}.{number}.rows")
                value = writer.node("MatMul", [stored, rows], f"{name}.{number}")
        return writer.node("Reshape", [value, writer.constant([0, -1, self._rotation.width])], name)
