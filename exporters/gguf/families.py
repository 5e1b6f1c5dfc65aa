"""What each model family is called in GGUF: rows of a table. Imports nothing heavy.

Names and keys follow ``gguf-py/gguf/constants.py``; what the llama.cpp graph expects of each is stated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from compress.models.topology import DecoderSpec, Family

HeadCount = Callable[[DecoderSpec], int]


@dataclass(frozen=True)
class GgufFamily:
    """One row: the architecture's name and the names under ``blk.N`` of each role.

    ``interleaved`` are the roles whose rows llama.cpp wants permuted (rotary pairs side by side, where the
    checkpoint has the two halves of a head), with the number of heads in which they are permuted.
    """

    architecture: str
    linears: Mapping[str, str]
    norms: Mapping[str, str]
    interleaved: Mapping[str, HeadCount]
    activation: str = "silu"
    embedding: str = "token_embd"
    final_norm: str = "output_norm"
    head: str = "output"


GGUF_FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "llama": GgufFamily(
            architecture="llama",
            linears={
                "q": "attn_q",
                "k": "attn_k",
                "v": "attn_v",
                "o": "attn_output",
                "gate": "ffn_gate",
                "up": "ffn_up",
                "down": "ffn_down",
            },
            norms={"attention": "attn_norm", "feed_forward": "ffn_norm"},
            interleaved={"q": lambda spec: spec.heads, "k": lambda spec: spec.kv_heads},
        ),
    }
)

ROPE_TYPES = ("default", "linear", "yarn", "llama3")
_YARN_FIXED: Mapping[str, object] = MappingProxyType(
    {
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
        "beta_fast": 32,
        "beta_slow": 1,
        "truncate": True,
    }
)
"""What llama.cpp 0.3.36 computes for a llama whatever the file says: its beta keys are read and not used (tried)."""


@dataclass(frozen=True)
class Slot:
    """One tensor of the file and the checkpoint's tensor that it holds.

    ``layer`` is set for a weight matrix; ``heads`` > 0 means rows permuted within that many heads.
    """

    name: str
    source: str
    layer: str | None = None
    heads: int = 0


def slots(spec: DecoderSpec, has_dense: Callable[[str], bool]) -> Iterator[Slot]:
    """Every tensor of the file in its order; biases where the checkpoint has them."""
    row, family = GGUF_FAMILIES[spec.family.name], spec.family
    yield Slot(f"{row.embedding}.weight", f"{family.embedding}.weight", family.embedding)
    yield Slot(f"{row.final_norm}.weight", f"{family.final_norm}.weight")
    if not spec.tied:
        yield Slot(f"{row.head}.weight", f"{family.head}.weight", family.head)
    for index in range(spec.layers):
        for role, norm in row.norms.items():
            yield Slot(f"blk.{index}.{norm}.weight", f"{spec.norm(index, role)}.weight")
        for role, linear in row.linears.items():
            layer = spec.linear(index, role)
            heads = row.interleaved[role](spec) if role in row.interleaved else 0
            yield Slot(f"blk.{index}.{linear}.weight", f"{layer}.weight", layer, heads)
            if has_dense(f"{layer}.bias"):
                yield Slot(f"blk.{index}.{linear}.bias", f"{layer}.bias", None, heads)


def layer_names(family: Family, blocks: int) -> dict[str, tuple[str, str]]:
    """GGUF tensor name -> (layer of the checkpoint, role) of every weight matrix that a file may hold."""
    row = GGUF_FAMILIES[family.name]
    found = {f"{row.embedding}.weight": (family.embedding, ""), f"{row.head}.weight": (family.head, "")}
    for index in range(blocks):
        block = family.block.format(index=index)
        for role, linear in row.linears.items():
            found[f"blk.{index}.{linear}.weight"] = (f"{block}.{family.linears[role]}", role)
    return found


def spec_complaints(spec: DecoderSpec) -> Sequence[str]:
    """What llama.cpp's graph of this family does not compute, one complaint each."""
    row = GGUF_FAMILIES.get(spec.family.name)
    if row is None:
        known = ", ".join(GGUF_FAMILIES)
        return [f"the GGUF exporter does not know the family '{spec.family.name}'; it knows {known}"]
    complaints = []
    if spec.activation != row.activation:
        complaints.append(f"llama.cpp computes {row.architecture} with {row.activation}, not '{spec.activation}'")
    return complaints + list(_rope_complaints(spec))


def _rope_complaints(spec: DecoderSpec) -> Iterator[str]:
    kind = spec.rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        yield f"rope type '{kind}' has no GGUF keys that llama.cpp reads; known: {', '.join(ROPE_TYPES)}"
    share = spec.rope.get("partial_rotary_factor")
    if share not in (None, 1, 1.0):
        yield f"rotary positions over {share} of a head is not what llama.cpp computes for this family"
    if kind == "yarn":
        for key, fixed in _YARN_FIXED.items():
            if spec.rope.get(key) not in (None, fixed):
                usual = "not set" if fixed is None else fixed
                yield f"rope type 'yarn' with {key}={spec.rope[key]}: llama.cpp computes it as if that were {usual}"
