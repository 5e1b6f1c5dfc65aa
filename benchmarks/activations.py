"""What 8-bit activations cost, role by role: which layers are worth `onnx: {float_activations: [...]}`.

    python -m benchmarks.activations --artifact FOLDER/onnx --text calib.txt --tokens 512

The real runtime reads the text with fp32 activations everywhere, then with 8-bit activations in the layers of one role
alone (or, with ``--each ROLE``, in one layer of it alone). KLD in nats a token, from the first to the others; the costs
of roles add up to nearly that of all. Beside them the share of the weights that fp32 activations would slow down. Not
for the standard dialect, whose files have no level.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from tokenizers import Tokenizer

from compress.runner.artifact import find_artifact
from compress.runner.ort import open_session, session_options
from compress.runner.quality import compare

FP32, INT8 = 0, 4


class Bed:
    """One artifact and one text, run with any level in any layer."""

    def __init__(self, entry: Path, text: Path, tokens: int, threads: int) -> None:
        self._entry, self._threads = entry, threads
        self._model = onnx.load(entry, load_external_data=False)
        tokenizer = Tokenizer.from_file(str(entry.parent / "tokenizer.json"))
        found = tokenizer.encode(text.read_text(encoding="utf-8")[: 16 * tokens]).ids[:tokens]
        self._tokens = np.array(found, dtype=np.int64)
        self.weights: Mapping[str, int] = {
            node.name: math.prod(attribute.i for attribute in node.attribute if attribute.name in ("K", "N"))
            for node in self._products()
        }
        self._exact = self._logits(lambda _: FP32)

    def _products(self) -> list[Any]:
        return [node for node in self._model.graph.node if node.op_type == "MatMulNBits"]

    def cost(self, rounded: Callable[[str], bool]) -> float:
        """KLD of 8-bit activations in the layers that ``rounded`` picks."""
        logits = self._logits(lambda layer: INT8 if rounded(layer) else FP32)
        return float(compare(self._exact, logits, self._tokens, self._threads).kld.mean())

    def _logits(self, level: Callable[[str], int]) -> NDArray[np.float32]:
        for node in self._products():
            for attribute in node.attribute:
                if attribute.name == "accuracy_level":
                    attribute.i = level(node.name)
        options = session_options(self._entry, self._threads, spin=False)
        session = open_session(self._entry, options, self._model.SerializeToString())
        feeds = {"input_ids": self._tokens[None], "attention_mask": np.ones((1, len(self._tokens)), dtype=np.int64)}
        types = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}
        for item in session.get_inputs():
            if item.name.startswith("past_key_values."):
                dtype = types.get(item.type, np.uint8)
                feeds[item.name] = np.zeros((1, item.shape[1], 0, item.shape[3]), dtype=dtype)
        logits: NDArray[np.float32] = session.run(["logits"], feeds)[0][0]
        return logits


def role(layer: str) -> str:
    """The last part of a layer's name."""
    return layer.rpartition(".")[2]


def has_role(name: str, layer: str) -> bool:
    """Whether ``layer`` is one of that role."""
    return role(layer) == name


def main() -> None:
    """Read the arguments, print a row for each role or layer as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--each", help="a role, such as down_proj or (one product) gate_proj+up_proj: a row a layer")
    options = parser.parse_args()
    artifact = find_artifact(options.artifact, "onnx")
    bed = Bed(artifact.path / artifact.entry, options.text, options.tokens, options.threads)
    print("$", *sys.argv)
    print(*(f"{name} {version(name)}" for name in ("edgepress", "onnxruntime")), sep=", ")
    print("| 8-bit activations in | KLD | of the weights |\n|---|---|---|")
    parts: dict[str, Callable[[str], bool]] = {"all": lambda _: True}
    if options.each:
        parts |= {layer: layer.__eq__ for layer in bed.weights if role(layer) == options.each}
    else:
        parts |= {name: partial(has_role, name) for name in map(role, bed.weights)}
    total = sum(bed.weights.values())
    for name, picks in parts.items():
        share = sum(count for layer, count in bed.weights.items() if picks(layer)) / total
        print(f"| {name} | {bed.cost(picks):.5f} | {share:.1%} |", flush=True)


if __name__ == "__main__":
    main()
