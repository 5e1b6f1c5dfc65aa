"""edgepress: compress a language model by a recipe, write ONNX and GGUF files, measure those very files.

``load_recipe``, ``plan`` and ``run`` (see :mod:`compress.api`) are loaded when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__compress__ = __version__
__all__ = ["__version__", "load_recipe", "plan", "run"]

if TYPE_CHECKING:
    from compress.api import load_recipe, plan, run
else:

    def __getattr__(name: str) -> object:
        # By name: every module imports this one, and most of them must not reach the engine.
        if name not in __all__:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        from importlib import import_module

        return getattr(import_module("compress.api"), name)
