"""Reads an artifact back with the onnx package and numpy; shares no code with what packed it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import external_data_helper, helper, numpy_helper

from compress.protocols import StoredTensor
from compress.scheme import CODEBOOKS, QuantScheme

_WEIGHT_INPUTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "MatMulNBits": {"codes": 1, "scales": 2, "zero_points": 3},
        "MatMulBnb4": {"codes": 1, "scales": 2},
        "GatherBlockQuantized": {"codes": 0, "scales": 2, "zero_points": 3},
        "DequantizeLinear": {"codes": 0, "scales": 1, "zero_points": 2},
        "MatMul": {"weight": 1},
        "Gather": {"weight": 0},
    }
)
"""Operators that hold a layer's weight, and the input where each part of it lies."""
_NF4_QUANT_TYPE = 1
_BESIDE = ".lowrank."
"""In the name of a node whose matrix lies beside a layer: what it takes is counted with the layer's."""
_BITS: Mapping[int, int] = MappingProxyType(
    {onnx.TensorProto.INT4: 4, onnx.TensorProto.UINT4: 4, onnx.TensorProto.INT8: 8, onnx.TensorProto.UINT8: 8}
)
"""Types of codes that are matrices of numbers, not of bytes."""


@dataclass(frozen=True)
class _Layer:
    """A layer as its node describes it. ``tensors``: role (codes, scales, zero_points, or weight) -> stored tensor."""

    name: str
    shape: tuple[int, int]
    scheme: QuantScheme | None
    transposed: bool
    tensors: Mapping[str, str]


class _Graph:
    """The model file; data are read tensor by tensor, when asked for."""

    def __init__(self, path: Path) -> None:
        model = onnx.load(path, load_external_data=False)
        self._folder = path.parent
        self._producers = {node.output[0]: node for node in model.graph.node}
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in model.graph.initializer}
        self._nodes = {node.name: node for node in model.graph.node}
        found = [layer for node in model.graph.node for layer in self._stored_by(node)]
        # What turns codes into numbers is no layer, and codes that serve twice (a tied head) are one.
        parts = {name for layer in found for role, name in layer.tensors.items() if role not in ("codes", "weight")}
        self.layers: dict[str, _Layer] = {}
        for layer in found:
            main = next(iter(layer.tensors.values()))
            if main not in parts:
                self.layers[layer.name] = layer
                parts.add(main)

    def array(self, name: str) -> NDArray[Any]:
        """The values of a stored tensor."""
        tensor = onnx.TensorProto()
        tensor.CopyFrom(self.tensors[name])
        if external_data_helper.uses_external_data(tensor):
            external_data_helper.load_external_data_for_tensor(tensor, str(self._folder))
        array: NDArray[Any] = numpy_helper.to_array(tensor)
        return array

    def bytes(self, name: str) -> int:
        """Bytes that a stored tensor takes."""
        tensor = self.tensors[name]
        count: int = math.prod(tensor.dims)
        bits: int = _BITS.get(tensor.data_type, 8 * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
        return -(-count * bits // 8)

    def weight(self, layer: _Layer) -> NDArray[np.float32]:
        """float32 [out, in]: ``(code - zero point) * scale``, or the stored numbers themselves."""
        if layer.scheme is None:
            stored: NDArray[np.float32] = self.array(layer.tensors["weight"]).astype(np.float32)
            return stored.T if layer.transposed else stored
        rows, columns = layer.shape
        if layer.transposed:
            return self._columns_weight(layer, layer.scheme)
        if layer.scheme.codebook is not None:
            return self._codebook_weight(layer, layer.scheme)
        bits, block = layer.scheme.bits, layer.scheme.width(columns)
        scales = self.array(layer.tensors["scales"]).astype(np.float32)
        blocks = scales.shape[1]
        codes = _split_bytes(self.array(layer.tensors["codes"]).reshape(rows, -1), bits)
        zero_points = np.full((rows, blocks), 1 << (bits - 1), dtype=np.float32)
        if "zero_points" in layer.tensors:
            zero_points = _split_bytes(self.array(layer.tensors["zero_points"]), bits)[:, :blocks]
        centred = codes.reshape(rows, blocks, block) - zero_points[:, :, None]
        return (centred * scales[:, :, None]).reshape(rows, -1)[:, :columns]

    def _columns_weight(self, layer: _Layer, scheme: QuantScheme) -> NDArray[np.float32]:
        """float32 [out, in] of codes [in, out] with scales [in / block, out]; signed codes have no zero points."""
        block = scheme.width(layer.shape[1])
        parts = {role: self.array(name).astype(np.float32) for role, name in layer.tensors.items()}
        codes = parts["codes"]
        if "zero_points" in parts:
            codes = codes - parts["zero_points"].repeat(block, axis=0)
        weight: NDArray[np.float32] = codes * parts["scales"].repeat(block, axis=0)
        return np.ascontiguousarray(weight.T)

    def _columns_layer(self, node: Any, codes: Any) -> _Layer:
        """Of a DequantizeLinear, or of the Gathers that take an embedding's columns apart."""
        tensors = {"codes": codes.name}
        if node.op_type == "Gather":
            for role, gathered in (("scales", "scale"), ("zero_points", "zero")):
                other = self._nodes.get(f"{node.name}.{gathered}.columns")
                tensors |= {} if other is None else {role: self._sources(other.input[0])[0]}
        else:
            roles = _WEIGHT_INPUTS[node.op_type]
            tensors = {role: self._sources(node.input[at])[0] for role, at in roles.items() if at < len(node.input)}
        rows, columns = reversed(codes.dims)
        block = columns // self.tensors[tensors["scales"]].dims[0]
        scheme = QuantScheme(_BITS[codes.data_type], block, symmetric="zero_points" not in tensors)
        return _Layer(node.name, (rows, columns), scheme, True, tensors)

    def _codebook_weight(self, layer: _Layer, scheme: QuantScheme) -> NDArray[np.float32]:
        """float32 [out, in]: bytes hold two codes, high half first; blocks run through all rows."""
        halves = self.array(layer.tensors["codes"])
        codes = np.column_stack([halves >> 4, halves & 15])
        values = np.array(CODEBOOKS[str(scheme.codebook)], dtype=np.float32)[codes]
        scales = self.array(layer.tensors["scales"]).astype(np.float32)
        scaled: NDArray[np.float32] = values.reshape(len(scales), -1) * scales[:, None]
        return scaled.reshape(layer.shape)

    def _stored_by(self, node: Any) -> Iterator[_Layer]:
        """The layers whose weights a node multiplies by: one of its name, or several that a Concat puts together."""
        places = _WEIGHT_INPUTS.get(node.op_type, {})
        given = {role: node.input[at] for role, at in places.items() if at < len(node.input) and node.input[at]}
        parts = [self._sources(value) for value in given.values()]
        several = any(len(names) > 1 for names in parts)
        for names in zip(*parts, strict=True):
            layer = self._layer(node, dict(zip(given, names, strict=True)))
            if layer is not None:
                yield replace(layer, name=names[0].removesuffix(".codes")) if several else layer

    def _layer(self, node: Any, tensors: Mapping[str, str]) -> _Layer | None:
        """What a node stores in ``tensors``, or None: a tied head computes with another layer's."""
        main = self.tensors.get(next(iter(tensors.values()), ""))
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        if node.op_type == "MatMulBnb4" and main is not None:
            if attributes["quant_type"] != _NF4_QUANT_TYPE:
                return None
            scheme = QuantScheme(4, attributes["block_size"], codebook="nf4")
            return _Layer(node.name, (attributes["N"], attributes["K"]), scheme, False, tensors)
        if main is None or len(main.dims) < 2:
            return None
        if node.op_type in ("DequantizeLinear", "Gather") and main.data_type in _BITS:
            return self._columns_layer(node, main)
        transposed = node.op_type == "MatMul"
        if "weight" in tensors:
            rows, columns = reversed(main.dims) if transposed else main.dims
            return _Layer(node.name, (rows, columns), None, transposed, tensors)
        bits, block = attributes["bits"], attributes["block_size"]
        padded = math.prod(main.dims[1:]) * 8 // bits
        scheme = QuantScheme(bits, block, symmetric="zero_points" not in tensors)
        return _Layer(node.name, (main.dims[0], attributes.get("K") or self._cut(node, padded)), scheme, False, tensors)

    def _sources(self, value: str) -> list[str]:
        """The stored tensors behind a value, through Cast, Identity and Concat; an empty string where there is none."""
        if value in self.tensors:
            return [value]
        producer = self._producers.get(value)
        if producer is None or producer.op_type not in ("Cast", "Identity", "Concat"):
            return [""]
        return [name for given in producer.input for name in self._sources(given)]

    def _cut(self, node: Any, padded: int) -> int:
        """Columns of an embedding: those that the Slice behind it keeps, or all of them."""
        for consumer in self._producers.values():
            if consumer.op_type == "Slice" and consumer.input[0] == node.output[0]:
                return int(self.array(consumer.input[2])[0])
        return padded


def _split_bytes(stored: NDArray[np.uint8], bits: int) -> NDArray[np.float32]:
    """The numbers in each row of bytes, low bits first, as float32."""
    parts = [(stored >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(stored.shape[0], -1).astype(np.float32)


def read_weights(path: Path, layers: Sequence[str]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """(layer, float32 [out, in]), one layer in memory at a time; KeyError names every layer that the file lacks."""
    graph = _Graph(path)
    missing = [layer for layer in layers if layer not in graph.layers]
    if missing:
        raise KeyError(f"{path} stores no weight of {', '.join(missing)}")
    for layer in layers:
        yield layer, graph.weight(graph.layers[layer])


def stored_tensors(path: Path) -> list[StoredTensor]:
    """One row a layer, with all its tensors, and one for every other tensor; from the model file alone."""
    graph = _Graph(path)
    rows = []
    for layer in graph.layers.values():
        if _BESIDE in layer.name:
            continue
        main = next(iter(layer.tensors.values()))
        kind = _type_name(graph.tensors[main]) if layer.scheme is None else str(layer.scheme)
        beside = [graph.layers[name] for part in "uv" if (name := f"{layer.name}{_BESIDE}{part}") in graph.layers]
        size = sum(graph.bytes(name) for one in (layer, *beside) for name in one.tensors.values())
        rows.append(StoredTensor(main, kind, layer.shape, size, layer.name))
    inside = {name for layer in graph.layers.values() for name in layer.tensors.values()}
    for name, tensor in graph.tensors.items():
        if name not in inside:
            rows.append(StoredTensor(name, _type_name(tensor), tuple(tensor.dims), graph.bytes(name)))
    return rows


def _type_name(tensor: Any) -> str:
    return str(helper.tensor_dtype_to_np_dtype(tensor.data_type))
