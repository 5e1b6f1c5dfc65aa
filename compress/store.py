"""The work directory: what each block became, one safetensors file a block, read back lazily."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.journal import PARTIAL, put_in_place
from compress.kv import KVScales, KVScheme
from compress.scheme import QuantScheme
from compress.tensor import LowRank, QuantizedTensor

if TYPE_CHECKING:
    from compress.session import Session


@dataclass
class Store:
    """Quantised layers and changed dense tensors of a run, on disk under ``root``.

    Only names, schemes and scales of caches are kept in memory, so a model of any size needs the memory of one layer.
    """

    root: Path
    schemes: dict[str, QuantScheme] = field(default_factory=dict)
    _files: dict[str, Path] = field(default_factory=dict)
    _dense: dict[str, Path] = field(default_factory=dict)
    _kv: dict[str, KVScales] = field(default_factory=dict)

    def put(
        self,
        block: str,
        quantized: Mapping[str, QuantizedTensor],
        dense: Mapping[str, Tensor],
        kv: KVScales | None = None,
    ) -> None:
        """Write one block's results; the file appears whole, and on the disk, or not at all."""
        tensors: dict[str, Tensor] = {f"dense:{name}": tensor.contiguous() for name, tensor in dense.items()}
        for name, item in quantized.items():
            tensors.update({f"{name}:{part}": tensor.contiguous() for part, tensor in item.tensors().items()})
        if kv is not None:
            tensors |= {"kv:key": kv.key.contiguous(), "kv:value": kv.value.contiguous()}
        if not tensors:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.file(block)
        partial = path.with_suffix(PARTIAL)
        save_file(tensors, partial)
        put_in_place(partial, path)
        self.take(
            block,
            {name: item.scheme for name, item in quantized.items()},
            list(dense),
            None if kv is None else kv.scheme,
        )

    def file(self, block: str) -> Path:
        """Where :meth:`put` writes a block that has anything to write."""
        return self.root / f"{block}.safetensors"

    def take(
        self, block: str, schemes: Mapping[str, QuantScheme], dense: Sequence[str], kv: KVScheme | None = None
    ) -> None:
        """Know what the file of ``block`` holds: quantised layers with their schemes, dense tensors, cache scales."""
        path = self.file(block)
        self.schemes.update(schemes)
        self._files.update(dict.fromkeys(schemes, path))
        self._dense.update(dict.fromkeys(dense, path))
        if kv is not None:
            with safe_open(path, framework="pt") as file:
                self._kv[block] = KVScales(kv, file.get_tensor("kv:key"), file.get_tensor("kv:value"))

    def quantized(self, name: str) -> QuantizedTensor:
        """The layer ``name``; KeyError if it was left in floating point."""
        scheme = self.schemes[name]
        mark = f"{name}:"
        with safe_open(self._files[name], framework="pt") as file:
            held = [key for key in set(file.keys()) if key.startswith(mark)]
            return QuantizedTensor.of(scheme, {key[len(mark) :]: file.get_tensor(key) for key in held})

    def residual(self, name: str) -> LowRank | None:
        """What lies beside the quantised layer ``name``, without its codes; None where nothing does."""
        with safe_open(self._files[name], framework="pt") as file:
            keys = [f"{name}:{part}" for part in ("u", "v")]
            return LowRank(*map(file.get_tensor, keys)) if keys[0] in set(file.keys()) else None

    def kv(self, block: str) -> KVScales | None:
        """Scales of the key/value cache of ``block``; None where it stays in floating point."""
        return self._kv.get(block)

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


def preserve(session: Session, file: Path) -> dict[str, Any]:
    """Write what a pass over the whole model handed on: the plan, and every field that maps layers to tensors.

    Tensors go to ``file``; what comes back are plain JSON values for :func:`restore`.
    """
    tensors = {
        f"{item.name}:{layer}": tensor.clone()
        for item in fields(session)
        if isinstance(found := getattr(session, item.name), dict)
        for layer, tensor in found.items()
        if isinstance(tensor, Tensor)
    }
    partial = file.with_suffix(PARTIAL)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, partial)
    put_in_place(partial, file)
    return {"plan": {layer: str(scheme) for layer, scheme in session.plan.items()}}


def restore(session: Session, state: Mapping[str, Any], file: Path) -> None:
    """Give ``session`` what :func:`preserve` wrote."""
    session.plan.clear()
    session.plan.update({layer: QuantScheme.parse(text) for layer, text in state["plan"].items()})
    for name, tensor in load_file(file).items():
        field_name, _, layer = name.partition(":")
        getattr(session, field_name)[layer] = tensor
