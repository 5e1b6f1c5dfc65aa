"""Where the tensors of a checkpoint lie in the parameters of transformers' blocks: experts are fused there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """The block's parameters from its tensors by checkpoint name, differentiable; KeyError if one is missing.

    Tensors that :func:`unfused` made are put together without a copy.
    """
    fused: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor]] = {}
    shared = _shared_parameters(where, tensors, shapes)
    for name, place in where.items():
        if place.parameter in shared:
            continue
        if place.index:
            # In the order of :func:`places`, which is that of the rows.
            parts.setdefault(place.parameter, []).append(tensors[name])
        else:
            fused[place.parameter] = tensors[name]
    joined = {parameter: torch.cat(rows).view(*shapes[parameter]) for parameter, rows in parts.items()}
    return fused | joined | shared


def unfused(
    where: Mapping[str, Place], read: Callable[[str], Tensor], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """Every tensor of a block by checkpoint name; those of one fused parameter are views of it, in one piece."""
    fused: dict[str, Tensor] = {}
    found = {}
    for name, place in where.items():
        if not place.index:
            found[name] = read(name)
            continue
        if place.parameter not in fused:
            fused[place.parameter] = torch.empty(*shapes[place.parameter])
        found[name] = place.of(fused[place.parameter]).copy_(read(name))
    return found


def _shared_parameters(
    where: Mapping[str, Place], tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """The fused parameters of which all tensors are views already."""
    parts: dict[str, list[tuple[Place, Tensor]]] = {}
    for name, place in where.items():
        if place.index:
            parts.setdefault(place.parameter, []).append((place, tensors[name]))
    wholes = {parameter: _whole(found, tuple(shapes[parameter])) for parameter, found in parts.items()}
    return {parameter: whole for parameter, whole in wholes.items() if whole is not None}


def _whole(parts: Sequence[tuple[Place, Tensor]], shape: tuple[int, ...]) -> Tensor | None:
    """The tensor of ``shape`` that each of ``parts`` is a view of, at its place; None if there is none."""
    whole = parts[0][1]._base
    if whole is None or tuple(whole.shape) != shape:
        return None
    lies = all(part._base is whole and place.of(whole).data_ptr() == part.data_ptr() for place, part in parts)
    return whole if lies else None


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
