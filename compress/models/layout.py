"""Where the tensors of a checkpoint lie in the parameters of transformers' blocks: experts are fused there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.models.families import Family


@dataclass(frozen=True)
class Place:
    """A tensor inside a parameter: the whole of it, or the rows ``index`` (expert, slice of rows) of a fused one."""

    parameter: str
    index: tuple[int | slice, ...] = ()

    def of(self, parameter: Tensor) -> Tensor:
        """The tensor, as a view of the parameter (or of anything that has its shape)."""
        return parameter[self.index] if self.index else parameter


def places(family: Family, block: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, Place]:
    """Checkpoint name -> place, for a block (``model.layers.0``) whose parameters have ``shapes``.

    Parameters have transformers' names, without the block's: ``mlp.experts.gate_up_proj`` [experts, 2 * out, in].
    """
    found = {}
    for parameter, shape in shapes.items():
        if family.experts is None or parameter not in family.experts.fused:
            renamed = family.experts.renamed if family.experts else {}
            found[f"{block}.{renamed.get(parameter, parameter)}"] = Place(parameter)
            continue
        roles = family.experts.fused[parameter]
        rows = shape[1] // len(roles)
        for expert in range(shape[0]):
            for number, role in enumerate(roles):
                name = family.experts.linears[role].format(expert=expert)
                index = (expert, slice(number * rows, (number + 1) * rows))
                found[f"{block}.{name}.weight"] = Place(parameter, index)
    return found


def fuse(
    where: Mapping[str, Place], tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """The block's parameters from its tensors by checkpoint name, differentiable; KeyError if one is missing."""
    fused: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor]] = {}
    for name, place in where.items():
        if place.index:
            # In the order of :func:`places`, which is that of the rows.
            parts.setdefault(place.parameter, []).append(tensors[name])
        else:
            fused[place.parameter] = tensors[name]
    return fused | {parameter: torch.cat(rows).view(*shapes[parameter]) for parameter, rows in parts.items()}


def apart(family: Family, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[str, Place]]:
    """Checkpoint name -> (tensor of the file, place in it), for tensors that a file holds by transformers' own names.

    ``shapes`` are those of such tensors in the file; others are left out. transformers writes them so with
    ``save_pretrained(..., save_original_format=False)``.
    """
    found = {}
    own = (*family.experts.fused, *family.experts.renamed) if family.experts else ()
    for stored, shape in shapes.items():
        for parameter in own:
            if stored.endswith(f".{parameter}"):
                block = stored.removesuffix(f".{parameter}")
                there = places(family, block, {parameter: shape})
                found.update({name: (stored, place) for name, place in there.items()})
    return found
