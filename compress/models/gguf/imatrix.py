"""llama.cpp's importance matrices: for each input of a layer the sum of its squares over the calibration tokens.

The GGUF form that ``llama-imatrix`` writes and ``llama-quantize`` reads (ggml-org/llama.cpp, tools/imatrix): for each
weight ``NAME`` float32 ``NAME.in_sum2`` [matrices, in] and ``NAME.counts`` [matrices, 1], the tokens that were summed.
A tensor of experts has one matrix for each, any other one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compress.errors import InputError
from compress.models.gguf.archs import ARCHITECTURES, names_of
from compress.models.gguf.header import F32, SHOWN, TensorInfo, read_gguf
from compress.models.topology import DecoderSpec

SUMS, COUNTS = ".in_sum2", ".counts"
_AGAIN = "make it again, for this very model: compress imatrix MODEL --out FILE, or llama-imatrix"


@dataclass(frozen=True)
class Imatrix:
    """A file's entries by the weight's name in GGUF files (``blk.0.attn_q.weight``); read when they are asked for."""

    path: Path
    sums: Mapping[str, TensorInfo]
    counts: Mapping[str, TensorInfo]
    datasets: Sequence[str]
    chunk_count: int
    chunk_size: int

    def mean_squares(self, name: str, matrix: int = 0) -> F32 | None:
        """float32 [in]: mean square of each input of one matrix; None if no token reached it."""
        count = float(self.counts[name].rows(0, self._matrices(name)).reshape(-1)[matrix])
        return self.sums[name].rows(matrix, matrix + 1)[0] / np.float32(count) if count > 0 else None

    def _matrices(self, name: str) -> int:
        return int(np.prod(self.sums[name].shape[:-1]))


def read_imatrix(path: Path) -> Imatrix:
    """Open an importance matrix; InputError lists all that is wrong with it."""
    file = read_gguf(path)
    if file.text("general.type") != "imatrix":
        raise InputError(
            f"this is no importance matrix: its general.type is '{file.text('general.type')}', not imatrix",
            where=str(path),
            fix="give what compress imatrix or llama-imatrix wrote (llama-imatrix --in-file turns an old .dat file)",
        )
    parts: dict[str, dict[str, TensorInfo]] = {SUMS: {}, COUNTS: {}}
    problems = []
    for tensor, info in file.tensors.items():
        suffix = next((suffix for suffix in parts if tensor.endswith(suffix)), None)
        if suffix is None:
            problems.append(f"{tensor}: neither {SUMS} nor {COUNTS}")
        else:
            parts[suffix][tensor.removesuffix(suffix)] = info
    sums, counts = parts.values()
    problems += [f"{name}: has one of {SUMS} and {COUNTS} only" for name in sorted(sums.keys() ^ counts.keys())]
    for name in sorted(sums.keys() & counts.keys()):
        problems += [f"{name}: {text}" for text in _entry_problems(sums[name], counts[name])]
    if problems or not sums:
        listed = "\n".join(problems[:SHOWN]) + (f"\n... and {len(problems) - SHOWN} more" if problems[SHOWN:] else "")
        raise InputError(listed or "it has no entries", where=str(path), fix=_AGAIN)
    datasets = file.metadata.get("imatrix.datasets", [])
    chunks = (int(file.metadata.get(f"imatrix.chunk_{what}", 0)) for what in ("count", "size"))
    return Imatrix(path, sums, counts, datasets, *chunks)


def _entry_problems(sums: TensorInfo, counts: TensorInfo) -> list[str]:
    matrices = int(np.prod(sums.shape[:-1]))
    if int(np.prod(counts.shape)) != matrices or {sums.type, counts.type} != {"F32"}:
        return [f"{sums.type} {list(sums.shape)} and {counts.type} {list(counts.shape)} are no float32 sums and counts"]
    values = (sums.rows(0, matrices), counts.rows(0, int(np.prod(counts.shape[:-1]))))
    wrong = sum(int((~np.isfinite(each) | (each < 0)).sum()) for each in values)
    return [f"{wrong} values are negative or not finite"] if wrong else []


def write_imatrix(
    path: Path,
    entries: Mapping[str, tuple[F32, F32]],
    datasets: Sequence[str],
    chunk_count: int,
    chunk_size: int,
) -> None:
    """Write ``entries``: weight's name -> (sums float32 [matrices, in], counts float32 [matrices]). OSError passes."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", list(datasets))
    writer.add_uint32("imatrix.chunk_count", chunk_count)
    writer.add_uint32("imatrix.chunk_size", chunk_size)
    for name, (sums, counts) in sorted(entries.items()):
        writer.add_tensor(f"{name}{SUMS}", np.ascontiguousarray(sums, dtype=np.float32))
        writer.add_tensor(f"{name}{COUNTS}", np.ascontiguousarray(counts, dtype=np.float32)[:, None])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def entry_of(spec: DecoderSpec) -> dict[str, tuple[str, int]]:
    """Layer -> (name of its entry, which matrix of it), for the matrices of blocks and an untied head.

    InputError for a family that llama.cpp has no architecture for.
    """
    family = spec.family
    if family.name not in ARCHITECTURES:
        raise InputError(
            f"family '{family.name}' is not known to importance matrices", fix=f"known: {', '.join(ARCHITECTURES)}"
        )
    names = names_of(family, ARCHITECTURES[family.name], spec.layers)
    found = {} if spec.tied else {family.head: (f"{names[family.head]}.weight", 0)}
    for index in range(spec.layers):
        block = family.block.format(index=index)
        routed = {layer for expert in spec.expert_linears(index) for layer in expert.values()}
        found |= {layer: (f"{names[layer]}.weight", 0) for layer in spec.block_linears(index) if layer not in routed}
        for number, expert in enumerate(spec.expert_linears(index)):
            assert family.experts is not None
            found |= {
                layer: (f"{names[f'{block}.{family.experts.linears[role]}']}.weight", number)
                for role, layer in expert.items()
            }
    return found


def misfits(imatrix: Imatrix, spec: DecoderSpec, shapes: Mapping[str, tuple[int, int]]) -> list[str]:
    """What shows that a file was made for another model: unknown names, other widths, other numbers of matrices."""
    entries = entry_of(spec)
    wanted: dict[str, tuple[int, int]] = {}
    for layer, (name, matrix) in entries.items():
        wanted[name] = max(wanted.get(name, (0, 0)), (matrix + 1, shapes[layer][1]))
    problems = []
    for name, info in imatrix.sums.items():
        has = (int(np.prod(info.shape[:-1])), info.shape[-1])
        # Routers stay in floating point, and a tied head is the embedding.
        aside = name.startswith(("token_embd.", "output.")) or ".ffn_gate_inp" in name
        if name not in wanted and not aside:
            problems.append(f"{name}: the model has no such weight")
        elif name in wanted and has != wanted[name]:
            problems.append(
                f"{name}: {has[0]} x {has[1]} inputs, and the model has {wanted[name][0]} x {wanted[name][1]}"
            )
    return problems
