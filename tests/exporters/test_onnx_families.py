"""The graph of every family computes what the torch decoder computes with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor

from compress.models.checkpoint import open_checkpoint
from compress.models.decoder import Decoder
from compress.session import CompressedModel
from exporters.onnx import OnnxExporter
from tests.compress.families import ROUTED, VARIANTS, saved, tokens_of
from tests.exporters.test_onnx_parity import session, step
from tests.support import mean_kld, rounded_model

every_variant = pytest.mark.parametrize("variant", VARIANTS)
CLOSE = {"atol": 2e-4, "rtol": 0.0}
LENGTH = 24
"""Three times the windows of the variants."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(variant: str, folder: Path, scheme: str | None = "int4-g32") -> CompressedModel:
    """Rounded naively, or (None) with every layer in floating point."""
    checkpoint = saved(variant, folder / "model")
    if scheme is None:
        return rounded_model(checkpoint, folder / "work", None, ends=None)
    return rounded_model(checkpoint, folder / "work", scheme)


def torch_logits(model: CompressedModel, tokens: Tensor) -> Tensor:
    return torch.stack(list(Decoder(open_checkpoint(model.folder), model.parameter).logits(tokens)))
