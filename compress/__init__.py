"""edgepress: compress a language model by a recipe, write ONNX and GGUF files, measure those very files."""

from __future__ import annotations

__version__ = "0.1.0"
__compress__ = __version__
