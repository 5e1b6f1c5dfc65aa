"""The nodes that multiply a turned stream by the final norm's gains, however many factors the rotation has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from compress.rotation import make_rotation
from exporters.onnx.stream import turned_gains
from exporters.onnx.writer import FLOAT, GraphWriter


@pytest.mark.parametrize(("width", "factors"), [(1, 0), (9, 1), (64, 1), (576, 2), (4096, 2), (8192, 3), (9 * 8192, 3)])
def test_the_gains_multiply_what_they_are_meant_for(width: int, factors: int, tmp_path: Path) -> None:
    rotation = make_rotation(width, seed=3)
    assert len(rotation.factors) == factors
    generator = torch.Generator().manual_seed(0)
    gains, states = torch.rand(width, generator=generator) + 0.5, torch.randn(2, 3, width, generator=generator)
    with GraphWriter(tmp_path / "model.onnx", "f32") as writer:
        hidden = writer.input("hidden", FLOAT, ["batch", "sequence", width])
        output = turned_gains(writer, rotation, hidden, gains.numpy())
        writer.output(output, FLOAT, ["batch", "sequence", width])
        writer.save({})
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    turned = rotation.right(states.reshape(-1, width)).reshape(states.shape)
    (found,) = session.run(None, {"hidden": turned.numpy()})
    expected = rotation.right((states * gains).reshape(-1, width)).reshape(states.shape)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
