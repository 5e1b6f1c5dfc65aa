"""ONNX for ONNX Runtime: block-quantised weights (MatMulNBits), 8-bit activations, one graph with a key/value cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from compress.errors import nearest
from compress.patterns import compile_pattern, match_layers
from compress.protocols import Artifact, StoredTensor
from exporters.onnx.limits import (
    DIALECT_REMARKS,
    DIALECTS,
    FLOAT_BITS,
    FP32_ACTIVATIONS,
    INT8_ACTIVATIONS,
    PARITY_KLD,
    STANDARD,
    complaints,
    context_remarks,
    float_activation_remarks,
    joined_layers,
    joining_remarks,
    plan_remarks,
    stored_bits,
    tokenizer_remarks,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from compress.kv import KVScheme
    from compress.models.topology import DecoderSpec
    from compress.scheme import QuantScheme
    from compress.session import CompressedModel

NO_PADDING = (
    "padding: false: padding in a batch is computed as if it were tokens, and behind its first step a batch takes one "
    "token a step"
)
ENTRY = "model.onnx"
"""The file that a runtime opens; its weights lie beside it in ``model.onnx.data``."""


@dataclass(frozen=True)
class OnnxExporter:
    """Writes ``model.onnx``, its data file, ``genai_config.json`` and the tokenizer.

    ``accuracy_level`` is set on every MatMulNBits node: 4 rounds activations to 8 bits (W4A8), 0 keeps them in fp32
    (2- and 8-bit weights are then some 30 times slower). Layers in nf4 become MatMulBnb4 nodes, whose activations are
    always fp32. ``float_activations`` are patterns of layers whose activations stay in fp32 whatever the level.
    ``float_type`` (f32, f16) is that of hidden states, cache, and layers in floating point. ``dialect``:
    onnxruntime, or standard (no operators but ONNX's own; no level, 4 and 8 bits). ``join_projections``: passes that
    choose schemes give layers that read the same input the same (queries, keys and values; gate and up), so that one
    product serves them: faster, and a larger loss at equal bytes. ``padding``: rows of a batch may be padded anywhere;
    without it no row may be, and small models are a little faster. ValueError for anything else.
    """

    accuracy_level: int = INT8_ACTIVATIONS
    float_type: str = "f32"
    dialect: str = DIALECTS[0]
    float_activations: tuple[str, ...] = ()
    join_projections: bool = False
    padding: bool = True

    format: ClassVar[str] = "onnx"
    holds_residual: ClassVar[bool] = True
    """Whether a low-rank product can lie beside a layer."""
    reader: ClassVar[str] = f"onnx {version('onnx')}"

    def __post_init__(self) -> None:
        level = self.accuracy_level
        if isinstance(level, bool) or level not in (FP32_ACTIVATIONS, INT8_ACTIVATIONS):
            raise ValueError(f"accuracy_level must be 0 (fp32 activations) or 4 (8-bit activations), not {level!r}")
        if self.float_type not in FLOAT_BITS:
            near = nearest(str(self.float_type), FLOAT_BITS)
            raise ValueError(f"float_type '{self.float_type}' is not known{near}; known: {', '.join(FLOAT_BITS)}")
        if self.dialect not in DIALECTS:
            near = nearest(str(self.dialect), DIALECTS)
            raise ValueError(f"dialect '{self.dialect}' is not known{near}; known: {', '.join(DIALECTS)}")
        for pattern in self.float_activations:
            compile_pattern(pattern)
        if self.float_activations and self.dialect == STANDARD:
            raise ValueError(f"float_activations: {DIALECT_REMARKS[STANDARD][0]}")
        if self.join_projections and self.dialect == STANDARD:
            raise ValueError("join_projections: the standard dialect has a product for each layer")
        if not self.padding and self.dialect == STANDARD:
            raise ValueError("padding: the standard dialect moves nothing, and takes padding at no cost")

    @property
    def has_levels(self) -> bool:
        """Whether the file says, layer by layer, if activations are rounded."""
        return self.dialect != STANDARD

    @property
    def parity_kld(self) -> float:
        """Run without 8-bit activations: in f32 only the order of summation differs, f16 rounds every result."""
        return PARITY_KLD[self.float_type]

    def check(
        self,
        spec: DecoderSpec,
        plan: Mapping[str, QuantScheme],
        shapes: Mapping[str, tuple[int, int]],
        kv: KVScheme | None = None,
        biased: Collection[str] = (),
    ) -> Sequence[str]:
        """Complaints about head size, rotary type, activation, each layer's scheme and the cache."""
        found = complaints(spec, plan, shapes, self.accuracy_level, self.dialect)
        if kv is not None and self.dialect == STANDARD:
            found.append(f"the standard's operators have no cache in {kv}; use dialect: {DIALECTS[0]}, or leave kv out")
        matches = match_layers(self.float_activations, [*spec.all_linears(), spec.family.head])
        found += [f"float_activations: '{pattern}' names no layer" for pattern, layers in matches.items() if not layers]
        return found

    def check_tokenizer(self, folder: Path, vocab_size: int) -> Sequence[str]:
        """Remarks about a tokenizer that a runtime could not use; its files are copied as they are."""
        return tokenizer_remarks(folder, vocab_size)

    def remarks(self, spec: DecoderSpec, plan: Mapping[str, QuantScheme]) -> Sequence[str]:
        """A context shorter than the model's, which layers have no 8-bit activations, and which stay apart."""
        told = [*context_remarks(spec), *plan_remarks(plan), *DIALECT_REMARKS[self.dialect]]
        excepted = self._excepted(spec)
        told += [] if self.padding else [NO_PADDING]
        told += joining_remarks(spec, plan, excepted) if self.join_projections else []
        # A tied head multiplies by the embedding's codes.
        tied = {spec.family.head: plan[spec.family.embedding]} if spec.tied and spec.family.embedding in plan else {}
        return told + float_activation_remarks(excepted, {**plan, **tied})

    def context_length(self, spec: DecoderSpec) -> int:
        """Up to the original positions of longrope, or to the model's last position."""
        from exporters.onnx.limits import context_length

        return context_length(spec)

    def one_scheme(self, spec: DecoderSpec) -> Sequence[Sequence[str]]:
        """Layers that read the same input, if ``join_projections``; each layer and each expert has its own tensors."""
        return joined_layers(spec) if self.join_projections else []

    def stored_bits(self, scheme: QuantScheme | None, shape: tuple[int, int]) -> int:
        """Bits of a linear layer in the file: padded codes, fp16 scales, packed zero points; or ``float_type``."""
        return stored_bits(scheme, shape, self.float_type, self.dialect)

    def write(self, model: CompressedModel, out: Path) -> Artifact:
        """Write the artifact into the empty folder ``out``, one layer in memory at a time; OSError passes through."""
        from compress.models.topology import describe
        from exporters.onnx.decoder import write_decoder
        from exporters.onnx.genai import write_companions
        from exporters.onnx.layers import Levels

        spec = describe(model.config, model.folder)
        excepted = dict.fromkeys((*self._excepted(spec), *model.float_activations), FP32_ACTIVATIONS)
        levels = Levels(self.accuracy_level, excepted)
        write_decoder(model, spec, out / ENTRY, levels, self.float_type, self.dialect, self.padding)
        write_companions(model, spec, out, ENTRY, self.dialect)
        return Artifact(self.format, out, ENTRY)

    def _excepted(self, spec: DecoderSpec) -> list[str]:
        """Layers that ``float_activations`` names, in the model's order."""
        layers = [*spec.all_linears(), spec.family.head]
        named = set().union(*match_layers(self.float_activations, layers).values())
        return [layer for layer in layers if layer in named]

    def read_back(self, artifact: Artifact, layers: Sequence[str]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """(layer, float32 [out, in]) of each of ``layers``, dequantised from the file; KeyError if one is missing."""
        from exporters.onnx.reader import read_weights

        return read_weights(artifact.path / artifact.entry, layers)

    def inspect(self, artifact: Artifact) -> Sequence[StoredTensor]:
        """Every stored tensor; a quantised layer is one row with its codes, scales and zero points."""
        from exporters.onnx.reader import stored_tensors

        return stored_tensors(artifact.path / artifact.entry)
