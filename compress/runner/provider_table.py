"""Which operators the execution providers of ONNX Runtime take, as their documents say. A table, nothing else.

It covers the operators that the exporter writes; what a document says of others is not copied here. Every row names
its document and the version of it that was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_STANDARD = (
    "Add And Attention Cast Concat CumSum DequantizeLinear Div Equal Gather GatherElements GatherND Gelu Identity Less "
    "LessOrEqual MatMul Max Mul Neg OneHot Or RMSNormalization Range ReduceSum Relu Reshape RotaryEmbedding Shape "
    "Sigmoid SimplifiedLayerNormalization Slice Softmax Split Squeeze Sub Tanh TopK Transpose Unsqueeze"
)
_MICROSOFT = (
    "GatherBlockQuantized GroupQueryAttention MatMulBnb4 MatMulNBits RotaryEmbedding SkipSimplifiedLayerNormalization"
)
_EVERYWHERE = (
    "Add Cast Concat DequantizeLinear Div Gelu Identity MatMul Mul Neg ReduceSum Relu Reshape Shape Sigmoid Slice "
    "Softmax Split Squeeze Sub Tanh Transpose Unsqueeze"
)


def _ops(standard: str, microsoft: str = "") -> frozenset[str]:
    """Operators as :class:`Documented` names them, from names separated by blanks."""
    return frozenset(standard.split()) | {f"com.microsoft:{name}" for name in microsoft.split()}


KNOWN = _ops(_STANDARD, _MICROSOFT)
"""The operators that the table is about; SimplifiedLayerNormalization lies in the standard's domain."""


@dataclass(frozen=True)
class Documented:
    """What one provider's document says.

    ``takes``: operators, those of Microsoft's domain with it in front. ``limits``: operator -> feature of a node ->
    the values that are taken; features are attributes, and ``float`` (type of hidden states), ``inputs`` (how many a
    node has, the last one included that is not left out) and ``constant`` (whether all but the first are known when
    the file is loaded). ``conditions``: operator -> what the document asks for and a node does not show. ``fixed``:
    whether all dimensions must be fixed. ``remark``: what else it says.
    """

    source: str
    takes: frozenset[str]
    limits: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)
    conditions: Mapping[str, str] = field(default_factory=dict)
    fixed: bool = False
    remark: str = ""


_KERNELS = "onnxruntime, docs/OperatorKernels.md (2026, with Attention-24) and the kernels' own checks of bits"
_CONSTANT: Mapping[str, tuple[Any, ...]] = MappingProxyType({"constant": (True,)})

TABLE: Mapping[str, Documented] = MappingProxyType(
    {
        "CUDA": Documented(
            _KERNELS,
            KNOWN,
            limits={
                "com.microsoft:GroupQueryAttention": {"float": ("float16",), "kv_cache_bit_width": (8,)},
                "com.microsoft:MatMulNBits": {"bits": (4, 8)},
            },
        ),
        "DirectML": Documented(
            _KERNELS,
            KNOWN - _ops("Attention Gelu RMSNormalization RotaryEmbedding", "GatherBlockQuantized MatMulBnb4"),
            limits={
                "com.microsoft:GroupQueryAttention": {"kv_cache_bit_width": ()},
                "com.microsoft:MatMulNBits": {"bits": (4, 8), "inputs": (3, 4)},
            },
        ),
        "WebGPU": Documented(
            "onnxruntime-web 1.30.0, docs/webgpu-operators.md",
            KNOWN - _ops("And Attention Identity Max OneHot Or RMSNormalization RotaryEmbedding TopK", "MatMulBnb4"),
            remark="its document names no types and no bits; Reshape and Shape run on the CPU",
        ),
        "WebNN": Documented(
            "onnxruntime-web 1.30.0, docs/webnn-operators.md",
            KNOWN - _ops("Attention OneHot RMSNormalization Range TopK", "MatMulBnb4"),
            limits={
                **dict.fromkeys(("CumSum", "ReduceSum", "Reshape", "Slice", "Split", "Squeeze"), _CONSTANT),
                "GatherND": {"batch_dims": (0,)},
                "com.microsoft:GroupQueryAttention": _CONSTANT,
                "com.microsoft:MatMulNBits": {"bits": (4, 8)},
            },
            conditions={"Reshape": "no 0 in the new shape"},
        ),
        "QNN": Documented(
            "onnxruntime-qnn 2.x, docs/execution_providers/QNN-ExecutionProvider.md and the notes of 2.4 and 2.5",
            KNOWN
            - _ops(
                "Attention Range",
                "GatherBlockQuantized GroupQueryAttention MatMulBnb4 SkipSimplifiedLayerNormalization",
            ),
            limits={"OneHot": _CONSTANT},
            conditions={
                "Gather": "positive indices only",
                "MatMul": "8- and 16-bit inputs on the HTP backend",
                "RotaryEmbedding": "HTP backend only",
                "com.microsoft:RotaryEmbedding": "HTP backend only",
            },
            fixed=True,
        ),
        "CoreML": Documented(
            "onnxruntime, tools/ci_build/github/apple/coreml_supported_mlprogram_ops.md (2026), as ML Program",
            (_ops(_EVERYWHERE) | _ops("GatherND Max Range")) - _ops("DequantizeLinear Neg"),
            limits={"GatherND": {"batch_dims": (0,)}, "Slice": _CONSTANT, "Split": _CONSTANT},
        ),
        "NNAPI": Documented(
            "onnxruntime, tools/ci_build/github/android/nnapi_supported_ops.md (2025)",
            (_ops(_EVERYWHERE) | _ops("Gather Max")) - _ops("Gelu ReduceSum Shape Split"),
            limits={"Gather": _CONSTANT, "DequantizeLinear": _CONSTANT},
        ),
        "XNNPACK": Documented(
            "onnxruntime, docs/execution-providers/Xnnpack-ExecutionProvider.md (2023)",
            _ops("MatMul Softmax"),
            conditions={"MatMul": "matrices of two dimensions only", "Softmax": "over the last axis only"},
        ),
    }
)
"""Provider -> what its document says."""
