"""Greedy text of one artifact, by onnxruntime-genai and by our runtime."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path

import numpy as np

from compress.runner.ort import OrtRuntime


def by_genai(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """At most ``count`` tokens after ``prompt``, up to the first that ends a text."""
    import onnxruntime_genai

    model = onnxruntime_genai.Model(str(folder))
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(prompt) + count)
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.append_tokens(prompt)
    found = []
    while not generator.is_done():
        generator.generate_next_token()
        found.append(int(generator.get_next_tokens()[0]))
    return found


def by_runtime(entry: Path, prompt: Sequence[int], count: int, ends: Container[int] = ()) -> list[int]:
    """The same; ``ends``: the tokens that end a text."""
    runtime = OrtRuntime(spin=False)
    runtime.load(entry, threads=1, context=len(prompt) + count)
    found = [int(runtime.prefill(np.array(prompt)).argmax())]
    while len(found) < count and found[-1] not in ends:
        found.append(int(runtime.decode(found[-1]).argmax()))
    return found
