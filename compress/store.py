"""The work directory: what each block became, one safetensors file a block, read back lazily."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from compress.scheme import QuantScheme
from compress.tensor import QuantizedTensor


@dataclass
class Store:
    """Quantised layers and changed dense tensors of a run, on disk under ``root``.

    Only names and schemes are kept in memory, so a model of any size needs the memory of one layer.
    """

    root: Path
    schemes: dict[str, QuantScheme] = field(default_factory=dict)
    _files: dict[str, Path] = field(default_factory=dict)
    _dense: dict[str, Path] = field(default_factory=dict)

    def put(self, block: str, quantized: Mapping[str, QuantizedTensor], dense: Mapping[str, Tensor]) -> None:
        """Write one block's results; the file appears whole or not at all."""
        tensors: dict[str, Tensor] = {f"dense:{name}": tensor.contiguous() for name, tensor in dense.items()}
        for name, item in quantized.items():
            tensors[f"{name}:codes"] = item.codes.contiguous()
            tensors[f"{name}:scale"] = item.scale.contiguous()
            if item.zero is not None:
                tensors[f"{name}:zero"] = item.zero.contiguous()
        if not tensors:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / f"{block}.safetensors"
        partial = path.with_suffix(".partial")
        save_file(tensors, partial)
        partial.replace(path)
        for name, item in quantized.items():
            self.schemes[name] = item.scheme
            self._files[name] = path
        self._dense.update(dict.fromkeys(dense, path))

    def quantized(self, name: str) -> QuantizedTensor:
        """The layer ``name``; KeyError if it was left in floating point."""
        scheme = self.schemes[name]
        with safe_open(self._files[name], framework="pt") as file:
            zero = None if scheme.symmetric else file.get_tensor(f"{name}:zero")
            return QuantizedTensor(scheme, file.get_tensor(f"{name}:codes"), file.get_tensor(f"{name}:scale"), zero)

    def dense(self, name: str) -> Tensor | None:
        """The dense tensor ``name`` if a pass changed it, else None."""
        path = self._dense.get(name)
        if path is None:
            return None
        with safe_open(path, framework="pt") as file:
            found: Tensor = file.get_tensor(f"dense:{name}")
            return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.schemes)
