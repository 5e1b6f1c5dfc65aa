"""Which nodes of an ONNX file each execution provider would take, and which it would leave to the CPU.

A provider that is installed is asked: ONNX Runtime says where it puts each node. Of the others only their documents
speak (:mod:`compress.runner.provider_table`).
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from compress.runner.ort import open_session, session_options
from compress.runner.provider_table import KNOWN, TABLE, Documented

Verdict = Literal["taken", "if", "left", "unknown"]
"""Taken; taken if the document's condition holds, which a node does not show; left to the CPU; not in our table."""

_FLOAT_HOLDERS: Mapping[str, int] = MappingProxyType(
    {"SimplifiedLayerNormalization": 1, "SkipSimplifiedLayerNormalization": 2, "RMSNormalization": 1}
)
"""Operators one of whose inputs is a stored tensor of the type of hidden states, and which."""
_FALLBACK = "CPUExecutionProvider"
_NOT_DEVICES = frozenset({"AzureExecutionProvider"})
"""Installed with ONNX Runtime, but it sends whole models to a service."""
_OPENVINO_REFUSAL = re.compile(r"^-- (?:com\.microsoft\.)?(\w+?)(?:-\d+)? with a message", re.M)


@dataclass(frozen=True)
class Operator:
    """The nodes of one operator that one provider treats alike; ``why`` they are not simply taken."""

    operator: str
    nodes: int
    verdict: Verdict
    why: str = ""


@dataclass(frozen=True)
class Provider:
    """What one provider would do with a file. ``how`` starts with "measured" or "documented" and names the source."""

    name: str
    how: str
    operators: tuple[Operator, ...]
    remark: str = ""
    refuses: bool = False
    """Whether it takes nothing of the file, since it cannot take all of it."""


@dataclass(frozen=True)
class _Node:
    operator: str
    features: Mapping[str, Any]


def providers(entry: Path) -> tuple[Provider, ...]:
    """Every provider that is installed or in the table, for the nodes of the file as it lies there.

    InputError if ONNX Runtime cannot open it.
    """
    # First what opens the file: it explains what is none.
    asked = [*_installed(entry), *_openvino(entry)]
    nodes, free = _read(entry)
    return (
        *asked,
        *(_documented(name, document, nodes, free) for name, document in TABLE.items()),
    )


def _read(entry: Path) -> tuple[list[_Node], list[str]]:
    """(nodes with what the table asks of them, inputs of which a dimension is free)."""
    import onnx
    from onnx import helper

    graph = onnx.load(entry, load_external_data=False).graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    constant = set(types) | {""}
    floats = Counter(
        types[node.input[at]]
        for node in graph.node
        if (at := _FLOAT_HOLDERS.get(node.op_type)) is not None and node.input[at] in types
    )
    float_type = str(helper.tensor_dtype_to_np_dtype(floats.most_common(1)[0][0])) if floats else None
    nodes = []
    for node in graph.node:
        domain = "" if node.domain in ("", "ai.onnx") else f"{node.domain}:"
        features = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        features["inputs"] = max((at for at, name in enumerate(node.input, 1) if name), default=0)
        # What follows from constants alone is computed when the file is loaded.
        features["constant"] = constant.issuperset(node.input[1:])
        if float_type is not None:
            features["float"] = float_type
        if constant.issuperset(node.input):
            constant.update(node.output)
        nodes.append(_Node(f"{domain}{node.op_type}", features))
    free = [
        value.name
        for value in graph.input
        if any(not dimension.HasField("dim_value") for dimension in value.type.tensor_type.shape.dim)
    ]
    return nodes, free


def _documented(name: str, document: Documented, nodes: list[_Node], free: list[str]) -> Provider:
    counts = Counter((node.operator, *_judge(document, node)) for node in nodes)
    remarks = [document.remark] if document.remark else []
    if document.fixed and free:
        remarks.append(
            f"nothing is taken while dimensions are free: fix those of the {len(free)} inputs; then see below"
        )
    refuses = document.fixed and bool(free)
    return Provider(name, f"documented: {document.source}", _sorted(counts), "; ".join(remarks), refuses)


def _judge(document: Documented, node: _Node) -> tuple[Verdict, str]:
    if node.operator not in KNOWN:
        return "unknown", "the table does not cover this operator"
    if node.operator not in document.takes:
        return "left", "not among its operators"
    for feature, values in document.limits.get(node.operator, {}).items():
        if feature in node.features and node.features[feature] not in values:
            return "left", _LIMITS.get(feature, f"{feature} {{found}}, it takes {{values}}").format(
                found=node.features[feature], values=", ".join(map(str, values)) or "none"
            )
    condition = document.conditions.get(node.operator)
    return ("taken", "") if condition is None else ("if", condition)


_LIMITS: Mapping[str, str] = MappingProxyType(
    {
        "float": "hidden states in {found}, it takes {values}",
        "constant": "inputs that are computed, it takes constants",
        "inputs": "{found} inputs, it takes {values}",
    }
)
"""Feature -> how a limit is explained; attributes are named as they are."""


def _sorted(counts: Counter[tuple[str, Verdict, str]]) -> tuple[Operator, ...]:
    rows = [Operator(operator, count, verdict, why) for (operator, verdict, why), count in counts.items()]
    return tuple(sorted(rows, key=lambda row: (row.operator, row.verdict)))


def _installed(entry: Path) -> Iterator[Provider]:
    """Each installed provider, before the CPU, on the nodes as they lie in the file: no optimisation changes them."""
    import onnxruntime

    for name in onnxruntime.get_available_providers():
        if name in _NOT_DEVICES:
            continue
        options = session_options(entry, threads=1, spin=False)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        session = open_session(entry, options, providers=list(dict.fromkeys((name, _FALLBACK))))
        counts: Counter[tuple[str, Verdict, str]] = Counter()
        for part in session.get_provider_graph_assignment_info():
            verdict: Verdict = "taken" if part.ep_name == name else "left"
            why = "" if verdict == "taken" else f"put on {part.ep_name}"
            for node in part.get_nodes():
                counts[f"{node.domain}:{node.op_type}" if node.domain else node.op_type, verdict, why] += 1
        how = f"measured: onnxruntime {onnxruntime.__version__} opened the file and said where each node runs"
        yield Provider(name.removesuffix("ExecutionProvider"), how, _sorted(counts))


def _openvino(entry: Path) -> Iterator[Provider]:
    """OpenVINO's own runtime, where it is installed; it takes a file whole or refuses it."""
    if importlib.util.find_spec("openvino") is None:
        return
    import openvino

    core, how = openvino.Core(), f"measured: openvino {openvino.__version__} read the file"
    try:
        model = core.read_model(str(entry))
    except RuntimeError as error:
        refused = Counter(_OPENVINO_REFUSAL.findall(str(error)))
        rows = tuple(Operator(name, count, "left", "not converted") for name, count in sorted(refused.items()))
        first, *_ = str(error).strip().splitlines()
        remark = "it refuses the file as a whole" if rows else f"it refuses the file: {first}"
        yield Provider("OpenVINO", how, rows, remark, refuses=True)
        return
    taken = core.query_model(model, "CPU")
    counts: Counter[tuple[str, Verdict, str]] = Counter()
    for operation in model.get_ops():
        verdict: Verdict = "taken" if operation.get_friendly_name() in taken else "left"
        counts[operation.get_type_name(), verdict, ""] += 1
    yield Provider("OpenVINO", how, _sorted(counts), "counted in its own operations, weights included")
