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
            # Rows of the channels that this factor mixes; multiplied from the left, since what is behind are columns.
            left = (factor if back else factor.T).float().numpy()
            matrix = writer.floats(f"{name}.factor.{number}", np.ascontiguousarray(left))
            shape = writer.constant([0, -1, order, behind])
            apart = writer.node("Reshape", [value, shape], f"{name}.{number}.apart")
            value = writer.node("MatMul", [matrix, apart], f"{name}.{number}")
        return writer.node("Reshape", [value, writer.constant([0, -1, self._rotation.width])], name)
