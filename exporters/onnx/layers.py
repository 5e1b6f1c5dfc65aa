"""Linear layers, the embedding and the head as nodes, each with its stored tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from compress.models.topology import DecoderSpec
from compress.session import CompressedModel
from compress.tensor import LowRank
from exporters.onnx.layout import to_blocks, to_codebook_blocks
from exporters.onnx.writer import FLOAT16, MICROSOFT, GraphWriter

_QUANT_TYPES = {"nf4": 1}
"""Codebook -> ``quant_type`` of MatMulBnb4."""


@dataclass(frozen=True)
class Levels:
    """``accuracy_level`` of each layer's node: ``usual``, but for the layers in ``excepted``."""

    usual: int
    excepted: Mapping[str, int] = field(default_factory=dict)

    def of(self, layer: str) -> int:
        """The level of ``layer``."""
        return self.excepted.get(layer, self.usual)


@dataclass(frozen=True)
class _Stored:
    """Names of one quantised layer's tensors in the graph, and its numbers."""

    codes: str
    scales: str
    zero_points: str | None
    rows: int
    columns: int
    block: int
    bits: int
    flat: bool
    """Whether codes are [out, bytes of a row], for GatherBlockQuantized, not [out, blocks, bytes of a block]."""


class LayerWriter:
    """Adds layers of ``model`` to a graph. A node carries the layer's name, which is how the reader finds it."""

    def __init__(self, model: CompressedModel, spec: DecoderSpec, writer: GraphWriter, levels: Levels) -> None:
        self._model = model
        self._spec = spec
        self._writer = writer
        self._levels = levels
        self._embeddings: dict[str, _Stored] = {}

    def linear(self, layer: str, value: str, output: str | None = None) -> str:
        """``value @ weight.T + bias``, as ``output`` or under the layer's name."""
        output = output or layer
        bias = self._bias(layer)
        if (residual := self._model.residual(layer)) is not None:
            main = self._quantised(layer, value, f"{layer}.main", bias)
            return self._beside(layer, residual, value, main, output)
        if layer in self._model.schemes:
            return self._quantised(layer, value, output, bias)
        weight = self._writer.floats(f"{layer}.weight", self._model.weight(layer).numpy().T)
        return self._matmul(layer, [value, weight], output, bias)

    def _beside(self, layer: str, residual: LowRank, value: str, main: str, output: str) -> str:
        """``main + value @ v.T @ u.T``; the matrices lie in fp16. The reader finds them by their nodes' names."""
        for part in ("v", "u"):
            node, matrix = f"{layer}.lowrank.{part}", getattr(residual, part).numpy().T
            weight = self._half(f"{node}.weight", np.ascontiguousarray(matrix, dtype=np.float16))
            value = self._writer.node("MatMul", [value, weight], node)
        return self._writer.node("Add", [main, value], f"{layer}.both", [output])

    def roles(self, index: int, widths: Mapping[str, int], value: str) -> dict[str, str]:
        """Role -> output of its layer in block ``index``, or its part of a fused one's; ``widths`` in their order."""
        fused = self.fused(index, list(widths))
        if fused is None:
            outputs = self.each([self._spec.linear(index, role) for role in widths], value)
        else:
            joined = self.linear(fused, value)
            outputs = self._split(joined, [f"{joined}.{role}" for role in widths], list(widths.values()))
        return dict(zip(widths, outputs, strict=True))

    def fused(self, index: int, roles: Sequence[str]) -> str | None:
        """The layer of block ``index`` whose rows are those of ``roles``, in their order; None where they are apart."""
        for fused, parts in self._spec.family.fused.items():
            if list(parts) == list(roles):
                return self._spec.linear(index, fused)
        return None

    def each(self, layers: Sequence[str], value: str) -> list[str]:
        """The output of each of ``layers``, from one product where they are stored alike."""
        joined = self.joined(layers, value)
        if joined is None:
            return [self.linear(layer, value) for layer in layers]
        return self._split(joined, layers, [self._model.shapes[layer][0] for layer in layers])

    def _split(self, joined: str, outputs: Sequence[str], widths: Sequence[int]) -> list[str]:
        names = list(outputs)
        self._writer.node("Split", [joined, self._writer.constant(list(widths))], f"{joined}.split", names, axis=-1)
        return names

    def joined(self, layers: Sequence[str], value: str) -> str | None:
        """Outputs of ``layers`` side by side, from one product; None where they are not stored alike.

        Each keeps its tensors; the runtime puts them together once, when it loads the file.
        """
        if not self._alike(layers):
            return None
        name = "+".join([layers[0], *(layer.rpartition(".")[2] for layer in layers[1:])])
        found = [self._store(layer) for layer in layers]

        def together(part: str, tensors: Sequence[str]) -> str:
            return self._writer.node("Concat", tensors, f"{name}.{part}", axis=0)

        zero_points = [one.zero_points for one in found if one.zero_points is not None]
        biases = [bias for layer in layers if (bias := self._bias(layer)) is not None]
        stored = replace(
            found[0],
            codes=together("codes", [one.codes for one in found]),
            scales=together("scales", [one.scales for one in found]),
            zero_points=together("zero_points", zero_points) if zero_points else None,
            rows=sum(one.rows for one in found),
        )
        bias = together("bias", biases) if biases else None
        return self._matmul_nbits(stored, name, value, name, bias, self._levels.of(layers[0]))

    def _alike(self, layers: Sequence[str]) -> bool:
        """Whether one node can multiply by all of ``layers``: one scheme, one level, biases for all or for none."""
        model = self._model
        schemes = {model.schemes.get(layer) for layer in layers}
        levels = {self._levels.of(layer) for layer in layers}
        biases = {model.has_dense(f"{layer}.bias") for layer in layers}
        if any(len(kinds) > 1 for kinds in (schemes, levels, biases)):
            return False
        scheme = schemes.pop()
        beside = any(model.residual(layer) is not None for layer in layers)
        return scheme is not None and scheme.codebook is None and not beside

    def norm(self, norm: str, value: str, gains: NDArray[np.float32] | None = None) -> str:
        """RMS norm over the last axis, times its gains, or ``gains`` [hidden]."""
        inputs = [value, self._norm_weight(norm, gains)]
        epsilon = self._spec.norm_eps
        return self._writer.node("SimplifiedLayerNormalization", inputs, norm, epsilon=epsilon, axis=-1, stash_type=1)

    def add_and_norm(
        self, norm: str, residual: str, branch: str, gains: NDArray[np.float32] | None = None
    ) -> tuple[str, str]:
        """(:meth:`norm` of residual + branch; that sum)."""
        total = f"{norm}.sum"
        normed = self._writer.node(
            "SkipSimplifiedLayerNormalization",
            [branch, residual, self._norm_weight(norm, gains)],
            norm,
            outputs=[norm, "", "", total],
            domain=MICROSOFT,
            epsilon=self._spec.norm_eps,
        )
        return normed, total

    def gains(self, norm: str) -> NDArray[np.float32]:
        """What a norm multiplies by [hidden]."""
        stored = self._model.dense(f"{norm}.weight").float()
        gains: NDArray[np.float32] = (stored + self._spec.family.norm_offset).numpy()
        return gains

    def _norm_weight(self, norm: str, gains: NDArray[np.float32] | None) -> str:
        return self._writer.floats(f"{norm}.weight", self.gains(norm) if gains is None else gains)

    def embedding(self, layer: str, input_ids: str) -> str:
        """Rows of the embedding [batch, sequence, hidden]."""
        if layer not in self._model.schemes:
            weight = self._writer.floats(f"{layer}.weight", self._model.weight(layer).numpy())
            return self._writer.node("Gather", [weight, input_ids], layer)
        stored = self._embeddings[layer] = self._store(layer, flat=True)
        rows = self._writer.node(
            "GatherBlockQuantized",
            [stored.codes, input_ids, stored.scales, *([stored.zero_points] if stored.zero_points else [])],
            layer,
            domain=MICROSOFT,
            bits=stored.bits,
            block_size=stored.block,
            gather_axis=0,
            quantize_axis=1,
        )
        if stored.columns % stored.block == 0:
            return rows
        # Codes are padded to whole blocks; the columns beyond the width are not part of the embedding.
        bounds = [self._writer.constant([number]) for number in (0, stored.columns, 2)]
        return self._writer.node("Slice", [rows, *bounds], f"{layer}.cut")

    def tied_head(self, embedding: str, head: str, value: str, output: str) -> str:
        """``value @ embedding.T``, from the very tensors that :meth:`embedding` stored."""
        bias = self._bias(head)
        if embedding in self._model.schemes:
            return self._matmul_nbits(self._embeddings[embedding], head, value, output, bias, self._levels.of(head))
        weight = self._writer.node("Transpose", [f"{embedding}.weight"], f"{head}.transposed", perm=[1, 0])
        return self._matmul(head, [value, weight], output, bias)

    def _quantised(self, layer: str, value: str, output: str, bias: str | None) -> str:
        if self._model.schemes[layer].codebook is not None:
            return self._matmul_bnb4(layer, value, output, bias)
        return self._matmul_nbits(self._store(layer), layer, value, output, bias, self._levels.of(layer))

    def _bias(self, layer: str) -> str | None:
        name = f"{layer}.bias"
        if not self._model.has_dense(name):
            return None
        return self._writer.floats(name, self._model.dense(name).float().numpy())

    def _matmul(self, layer: str, inputs: list[str], output: str, bias: str | None) -> str:
        product = self._writer.node("MatMul", inputs, layer, [output if bias is None else f"{layer}.product"])
        return product if bias is None else self._add_bias(layer, product, bias, output)

    def _add_bias(self, layer: str, product: str, bias: str, output: str) -> str:
        return self._writer.node("Add", [product, bias], f"{layer}.biased", [output])

    def _matmul_bnb4(self, layer: str, value: str, output: str, bias: str | None) -> str:
        """For a codebook. The operator has no bias, and nothing that rounds its input to 8 bits."""
        weight = self._model.quantized(layer)
        packed = to_codebook_blocks(layer, weight)
        codes = self._writer.tensor(f"{layer}.codes", packed.codes)
        product = self._writer.node(
            "MatMulBnb4",
            [value, codes, self._scales(layer, packed.scales)],
            layer,
            [output if bias is None else f"{layer}.product"],
            domain=MICROSOFT,
            K=weight.shape[1],
            N=weight.shape[0],
            block_size=packed.block,
            quant_type=_QUANT_TYPES[str(weight.scheme.codebook)],
        )
        return product if bias is None else self._add_bias(layer, product, bias, output)

    def _matmul_nbits(self, stored: _Stored, node: str, value: str, output: str, bias: str | None, level: int) -> str:
        inputs = [value, self._in_blocks(stored, node), stored.scales]
        if stored.zero_points or bias:
            inputs.append(stored.zero_points or "")
        if bias:
            inputs += ["", bias]
        return self._writer.node(
            "MatMulNBits",
            inputs,
            node,
            [output],
            domain=MICROSOFT,
            K=stored.columns,
            N=stored.rows,
            bits=stored.bits,
            block_size=stored.block,
            accuracy_level=level,
        )

    def _in_blocks(self, stored: _Stored, node: str) -> str:
        """The codes as [out, blocks, bytes of a block], through a node that the runtime removes when it loads the file.

        A session without graph optimisation keeps the Cast of the scales, and MatMulNBits would then compute nonsense
        from constant codes: it packs them at load, before it knows the scales. Behind a node they are not constant.
        """
        if not stored.flat:
            return self._writer.node("Identity", [stored.codes], f"{node}.blocks")
        blocks = -(-stored.columns // stored.block)
        shape = self._writer.constant([stored.rows, blocks, stored.block * stored.bits // 8])
        return self._writer.node("Reshape", [stored.codes, shape], f"{node}.blocks")

    def _store(self, layer: str, flat: bool = False) -> _Stored:
        """Write the tensors of a quantised layer."""
        weight = self._model.quantized(layer)
        rows, columns = weight.shape
        packed = to_blocks(layer, weight)
        codes = packed.codes.reshape(rows, -1) if flat else packed.codes
        zero_points = packed.zero_points
        return _Stored(
            codes=self._writer.tensor(f"{layer}.codes", codes),
            scales=self._scales(layer, packed.scales),
            zero_points=None if zero_points is None else self._writer.tensor(f"{layer}.zero_points", zero_points),
            rows=rows,
            columns=columns,
            block=packed.block,
            bits=weight.scheme.bits,
            flat=flat,
        )

    def _scales(self, layer: str, scales: NDArray[np.float16]) -> str:
        return self._half(f"{layer}.scales", scales)

    def _half(self, name: str, numbers: NDArray[np.float16]) -> str:
        """Numbers that lie in fp16; operators want them in the type of their inputs."""
        half, kind = self._writer.tensor(name, numbers), self._writer.float_type
        return half if kind == FLOAT16 else self._writer.node("Cast", [half], f"{name}.cast", to=kind)
