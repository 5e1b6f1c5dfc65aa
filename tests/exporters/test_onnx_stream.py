"""The nodes that turn hidden states compute what the rotation is, however many factors it has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from compress.rotation import make_rotation
from exporters.onnx.stream import StreamWriter
from exporters.onnx.writer import FLOAT, GraphWriter

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.parametrize(("width", "factors"), [(1, 0), (9, 1), (64, 1), (576, 2), (4096, 2), (8192, 3), (9 * 8192, 3)])
def test_a_stream_is_turned_and_turned_back(width: int, factors: int, tmp_path: Path) -> None:
    rotation = make_rotation(width, seed=3)
    assert len(rotation.factors) == factors
    with GraphWriter(tmp_path / "model.onnx", "f32") as writer:
        hidden = writer.input("hidden", FLOAT, ["batch", "sequence", width])
        stream = StreamWriter(rotation, writer)
        for name in (stream.turn(hidden), stream.turn_back(hidden)):
            writer.output(name, FLOAT, ["batch", "sequence", width])
        writer.save({})
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    states = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0))
    turned, back = (torch.from_numpy(found) for found in session.run(None, {"hidden": states.numpy()}))
    torch.testing.assert_close(turned, rotation.right(states.reshape(-1, width)).reshape(states.shape), **CLOSE)
    (again,) = session.run(["stream.unsigned"], {"hidden": turned.numpy()})
    np.testing.assert_allclose(again, states, **CLOSE)
    np.testing.assert_allclose(rotation.right(back.reshape(-1, width)).reshape(states.shape), states, **CLOSE)
