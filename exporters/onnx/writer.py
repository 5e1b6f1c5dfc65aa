"""Nodes and tensors of a graph under construction; matrices go to the data file at once, never kept in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from compress import __version__
from compress.errors import CompressError

MICROSOFT = "com.microsoft"
_OPSETS = (("", 21), (MICROSOFT, 1))
_STANDARD_OPSETS = (("", 23),)
_INLINE_BYTES = 1024
"""Tensors up to this size stay in the model file."""
_ALIGNMENT = 64
_PAGE = 4096
_PAGE_ALIGNED_FROM = 1 << 20
"""Tensors from this size on start on a page, so that a runtime can map them; smaller ones would waste their padding."""

Dims = Sequence[int | str]


class GraphWriter:
    """Collects one graph and writes ``model`` and ``model.data``; a data file that exists already is an error.

    Appending to an existing data file would keep the old tensors in it, referenced by nothing (onnx/onnx #6655).
    """

    def __init__(self, model: Path, float_type: str, standard: bool = False) -> None:
        self.float_type: int = _FLOAT_TYPES[float_type]
        """ONNX's number of the type of hidden states, norms, cache and whatever else is no integer."""
        self._dtype = helper.tensor_dtype_to_np_dtype(self.float_type)
        self._standard = standard
        self._model = model
        self._data: BinaryIO = model.with_name(f"{model.name}.data").open("xb")
        self._nodes: list[Any] = []
        self._initializers: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._constants: set[str] = set()
        self._vectors: list[tuple[Any, NDArray[Any]]] = []
        """Of norms and biases: read at every token, so they lie together, on few pages."""

    def __enter__(self) -> GraphWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._data.close()

    def input(self, name: str, dtype: int, dims: Dims) -> str:
        """A graph input."""
        self._inputs.append(helper.make_tensor_value_info(name, dtype, list(dims)))
        return name

    def output(self, name: str, dtype: int, dims: Dims) -> None:
        """A graph output: ``name`` is the value that some node produces."""
        self._outputs.append(helper.make_tensor_value_info(name, dtype, list(dims)))

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        name: str,
        outputs: Sequence[str] = (),
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add a node; the name of its first output, which is the node's name unless ``outputs`` says otherwise."""
        outputs = outputs or [name]
        self._nodes.append(helper.make_node(op, inputs, outputs, name=name, domain=domain, **attributes))
        return outputs[0]

    def tensor(self, name: str, array: NDArray[Any]) -> str:
        """An initializer: written to the data file now, or inline when small. OSError passes through."""
        return self._store(name, array, array.shape, helper.np_dtype_to_tensor_dtype(array.dtype))

    def packed(self, name: str, stored: NDArray[np.uint8], shape: tuple[int, ...], kind: str) -> str:
        """An initializer [shape] of int4, uint4, int8 or uint8 numbers from their bytes. OSError passes through."""
        return self._store(name, stored, shape, TensorProto.DataType.Value(kind.upper()))

    def _store(self, name: str, array: NDArray[Any], shape: tuple[int, ...], kind: int, late: bool = False) -> str:
        if array.nbytes <= _INLINE_BYTES:
            proto = TensorProto(name=name, dims=shape, data_type=kind, raw_data=array.tobytes())
            self._initializers.append(proto)
            return name
        proto = TensorProto(name=name, dims=shape, data_type=kind, data_location=TensorProto.EXTERNAL)
        self._initializers.append(proto)
        if late:
            self._vectors.append((proto, array))
        else:
            self._append(proto, array)
        return name

    def _append(self, proto: Any, array: NDArray[Any]) -> None:
        alignment = _PAGE if array.nbytes >= _PAGE_ALIGNED_FROM else _ALIGNMENT
        self._data.write(bytes(-self._data.tell() % alignment))
        place = {"location": f"{self._model.name}.data", "offset": self._data.tell(), "length": array.nbytes}
        for key, value in place.items():
            proto.external_data.add(key=key, value=str(value))
        self._data.write(np.ascontiguousarray(array).data)

    def floats(self, name: str, array: NDArray[np.float32]) -> str:
        """An initializer in the graph's type, a vector's data at the end; CompressError where a number is too large."""
        with np.errstate(over="ignore"):
            stored = array.astype(self._dtype)
        lost = int((~np.isfinite(stored)).sum())
        if lost:
            raise CompressError(f"{lost} of {array.size} numbers are too large for {self._dtype}", where=name)
        return self._store(name, stored, stored.shape, self.float_type, late=stored.ndim == 1)

    def constant(self, values: Sequence[int] | int | float) -> str:
        """A small constant, int64 or (a float) in the graph's type; the same one for the same values."""
        array = np.array(values)
        array = array.astype(self._dtype if array.dtype.kind == "f" else np.int64)
        name = f"{array.dtype} {array.tolist()}"
        if name not in self._constants:
            self._constants.add(name)
            self.tensor(name, array)
        return name

    def save(self, metadata: dict[str, str]) -> None:
        """Write the vectors and the model file, with ``metadata`` as its properties. OSError passes through."""
        for proto, array in self._vectors:
            self._append(proto, array)
        graph = helper.make_graph(self._nodes, "decoder", self._inputs, self._outputs, self._initializers)
        model = helper.make_model(
            graph,
            producer_name="edgepress",
            producer_version=__version__,
            ir_version=11 if self._standard else 10,
            opset_imports=[
                helper.make_opsetid(domain, number)
                for domain, number in (_STANDARD_OPSETS if self._standard else _OPSETS)
            ],
        )
        helper.set_model_props(model, metadata)
        self._data.flush()
        self._model.write_bytes(model.SerializeToString())


FLOAT: int = onnx.TensorProto.FLOAT
FLOAT16: int = onnx.TensorProto.FLOAT16
_FLOAT_TYPES = {"f32": FLOAT, "f16": FLOAT16}
INT64: int = onnx.TensorProto.INT64
BOOL: int = onnx.TensorProto.BOOL
INT32: int = onnx.TensorProto.INT32
INT8: int = onnx.TensorProto.INT8
UINT8: int = onnx.TensorProto.UINT8
