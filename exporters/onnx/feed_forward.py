"""The feed-forward part of a block as nodes: gated layers, and routed experts of which each computes its own tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compress.models.topology import DecoderSpec, Experts
from exporters.onnx.layers import LayerWriter
from exporters.onnx.limits import ACTIVATIONS
from exporters.onnx.writer import GraphWriter


class FeedForwardWriter:
    """Adds feed-forward layers to a graph. Hidden states are fp32 [batch, sequence, hidden]."""

    def __init__(self, spec: DecoderSpec, writer: GraphWriter, layers: LayerWriter) -> None:
        self._spec = spec
        self._writer = writer
        self._layers = layers

    def write(self, index: int, hidden: str) -> str:
        """Feed-forward of block ``index`` over ``hidden``."""
        spec = self._spec
        if spec.experts is not None and spec.has_experts(index):
            return self._with_experts(index, spec.experts, hidden)
        width = spec.intermediate_size
        parts = self._layers.roles(index, {"gate": width, "up": width}, hidden)
        return self._layers.linear(spec.linear(index, "down"), self._gated(parts["gate"], parts["up"]))

    def _gated(self, gate: str, up: str) -> str:
        return self._writer.node("Mul", [self._activation(gate), up], f"{gate}.gated")

    def _activation(self, gate: str) -> str:
        writer, name = self._writer, f"{gate}.activated"
        kind = ACTIVATIONS[self._spec.activation]
        if kind == "silu":
            return writer.node("Mul", [gate, writer.node("Sigmoid", [gate], f"{gate}.sigmoid")], name)
        if kind == "relu":
            return writer.node("Relu", [gate], name)
        return writer.node("Gelu", [gate], name, approximate="tanh" if kind == "gelu_tanh" else "none")

    def _layers_of(self, layers: Mapping[str, str], hidden: str) -> str:
        """Gate, up and down by their layers' names."""
        gate, up = self._layers.each([layers["gate"], layers["up"]], hidden)
        return self._layers.linear(layers["down"], self._gated(gate, up))

    def _with_experts(self, index: int, experts: Experts, hidden: str) -> str:
        """Routed experts, and beside them the expert that every token passes, where the family has one."""
        writer, names = self._writer, self._spec.family.experts
        assert names is not None
        block = self._spec.family.block.format(index=index)
        router = self._layers.linear(f"{block}.{names.router}", hidden)
        routed = self._routed(f"{block}.experts", index, experts, hidden, router)
        if not names.shared:
            return routed
        shared = self._layers_of({role: f"{block}.{name}" for role, name in names.shared.items()}, hidden)
        if names.shared_gate is not None:
            gate = self._layers.linear(f"{block}.{names.shared_gate}", hidden)
            share = writer.node("Sigmoid", [gate], f"{gate}.sigmoid")
            shared = writer.node("Mul", [shared, share], f"{gate}.scaled")
        return writer.node("Add", [routed, shared], f"{block}.experts.all")

    def _routed(self, name: str, index: int, experts: Experts, hidden: str, router: str) -> str:
        """Sum of the chosen experts' outputs, each times its probability.

        Every pair of a token and an expert that it chose is a row. Rows are sorted by expert and split: an expert that
        no token chose gets none, and its layers cost next to nothing (docs/decisions/onnx-experts.md).
        """
        writer, spec = self._writer, self._spec
        shares, chosen = self._choose(name, experts, router)
        order, counts = self._sort(name, experts.count, chosen)
        tokens = writer.node("Div", [order, writer.constant(experts.per_token)], f"{name}.tokens")
        flat = writer.node("Reshape", [hidden, writer.constant([-1, spec.hidden_size])], f"{name}.inputs")
        rows = writer.node("Gather", [flat, tokens], f"{name}.rows", axis=0)
        parts = [f"{name}.{expert}.rows" for expert in range(experts.count)]
        writer.node("Split", [rows, counts], f"{name}.split", outputs=parts, axis=0)
        layers = spec.expert_linears(index)
        outputs = [self._layers_of(linears, part) for linears, part in zip(layers, parts, strict=True)]
        return self._combine(name, experts, outputs, order, shares, hidden)

    def _choose(self, name: str, experts: Experts, router: str) -> tuple[str, str]:
        """(probabilities of the chosen experts fp32 [tokens, per_token], their numbers int64 [tokens * per_token])."""
        writer = self._writer
        flat = writer.node("Reshape", [router, writer.constant([-1, experts.count])], f"{name}.logits")
        chances = writer.node("Softmax", [flat], f"{name}.chances", axis=-1)
        outputs = [f"{name}.shares", f"{name}.choices"]
        shares = writer.node("TopK", [chances, writer.constant([experts.per_token])], f"{name}.top", outputs=outputs)
        if experts.normalised:
            total = writer.node("ReduceSum", [shares, writer.constant([-1])], f"{name}.total", keepdims=1)
            shares = writer.node("Div", [shares, total], f"{name}.normalised")
        return shares, writer.node("Reshape", [outputs[1], writer.constant([-1])], f"{name}.chosen")

    def _sort(self, name: str, count: int, chosen: str) -> tuple[str, str]:
        """(rows in the order of their experts int64 [rows], how many each expert has int64 [count])."""
        writer = self._writer
        rows = writer.node("Shape", [chosen], f"{name}.row_count")
        outputs = [f"{name}.sorted", f"{name}.order"]
        writer.node("TopK", [chosen, rows], f"{name}.sort", outputs=outputs, axis=0, largest=0)
        depth, values = writer.constant(count), writer.constant([0, 1])
        marks = writer.node("OneHot", [chosen, depth, values], f"{name}.marks", axis=-1)
        return outputs[1], writer.node("ReduceSum", [marks, writer.constant([0])], f"{name}.counts", keepdims=0)

    def _combine(
        self, name: str, experts: Experts, outputs: Sequence[str], order: str, shares: str, hidden: str
    ) -> str:
        """The experts' rows back in the order of tokens, weighted and summed, in the shape of ``hidden``."""
        writer = self._writer
        joined = writer.node("Concat", outputs, f"{name}.outputs", axis=0)
        places = [f"{name}.unsorted", f"{name}.places"]
        rows = writer.node("Shape", [order], f"{name}.place_count")
        writer.node("TopK", [order, rows], f"{name}.unsort", outputs=places, axis=0, largest=0)
        back = writer.node("Gather", [joined, places[1]], f"{name}.back", axis=0)
        size = self._spec.hidden_size
        apart = writer.node("Reshape", [back, writer.constant([-1, experts.per_token, size])], f"{name}.apart")
        weights = writer.node("Unsqueeze", [shares, writer.constant([1])], f"{name}.weights")
        summed = writer.node("MatMul", [weights, apart], f"{name}.sum")
        return writer.node("Reshape", [summed, writer.node("Shape", [hidden], f"{name}.shape")], name)
