"""What llama.cpp's architectures are in transformers' words: rows of a table, and ``config.json`` from metadata.

Keys are those of ``gguf-py/gguf/constants.py``; what llama.cpp computes where a file says nothing is stated here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from compress.errors import InputError, nearest
from compress.models.families import Family
from compress.models.gguf.header import F32, GgufFile

LLAMA3_LENGTHS = (8192, *(1 << power for power in range(8, 21) if power != 13))
"""Original lengths that are tried for Llama-3's scaling; those of Meta's models first."""
LLAMA3_FREQUENCIES = (1.0, 4.0)
"""``low_freq_factor`` and ``high_freq_factor`` of every model with that scaling."""
ROPE_FACTORS = {kind: f"rope_factors_{kind}.weight" for kind in ("long", "short")}
ROPE_FREQUENCIES = "rope_freqs.weight"
KNOWN_ASIDE = frozenset({ROPE_FREQUENCIES, *ROPE_FACTORS.values()})
"""Tensors that are part of the configuration in a checkpoint."""


def decimal(value: float) -> float:
    """The shortest decimal that is the same float32: what was written before it was rounded to that."""
    return float(str(np.float32(value)))


@dataclass
class Facts:
    """A file's metadata under its architecture's name; notes what is missing."""

    file: GgufFile
    missing: list[str] = field(default_factory=list)

    @property
    def architecture(self) -> str:
        """llama.cpp's name."""
        return self.file.text("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """A value; InputError where it differs from block to block."""
        found = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(found, list):
            if len(set(found)) > 1:
                raise InputError(
                    f"{self.architecture}.{key} differs from block to block: {found}",
                    where=str(self.file.path),
                    fix="no family here has such blocks",
                )
            found = found[0] if found else default
        return decimal(found) if isinstance(found, float) else found

    def need(self, key: str) -> Any:
        """A value that must be there; 0 where it is missing, which is noted."""
        found = self.get(key)
        if found is None:
            self.missing.append(f"{self.architecture}.{key}")
            return 0
        return found

    def tensor(self, name: str) -> F32:
        """A small tensor, flat."""
        info = self.file.tensors[name]
        return info.rows(0, int(np.prod(info.shape[:-1]))).reshape(-1)


@dataclass(frozen=True)
class Arch:
    """One row: the family that computes the same, and what is peculiar to it.

    ``config`` gives keys of ``config.json`` beyond the common ones. ``interleaved``: rows of q and k lie with rotary
    pairs side by side, where checkpoints have the two halves of a head.
    """

    family: str
    config: Callable[[Facts], dict[str, Any]] = lambda facts: {}
    interleaved: bool = False


def _nothing(facts: Facts) -> dict[str, Any]:
    return {"sliding_window": None, "use_sliding_window": False}


def _mixtral(facts: Facts) -> dict[str, Any]:
    count = {"num_local_experts": facts.need("expert_count"), "num_experts_per_tok": facts.need("expert_used_count")}
    return {"sliding_window": None, **count}


def _experts(facts: Facts) -> dict[str, Any]:
    return {
        **_nothing(facts),
        "num_experts": facts.need("expert_count"),
        "num_experts_per_tok": facts.need("expert_used_count"),
        "moe_intermediate_size": facts.need("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(facts: Facts) -> dict[str, Any]:
    shared = facts.need("expert_shared_feed_forward_length")
    return _experts(facts) | {"shared_expert_intermediate_size": shared, "norm_topk_prob": False}


def _qwen3_moe(facts: Facts) -> dict[str, Any]:
    return _experts(facts) | {"norm_topk_prob": True}


def _gemma(facts: Facts) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


_WIDE_HEADED = 46, 62
"""Blocks of the 27B models of gemma 2 and 3: llama.cpp scales their queries by hidden size / heads, not head size."""


def _local(facts: Facts) -> dict[str, Any]:
    per_head = facts.need("embedding_length") / max(1, facts.need("attention.head_count"))
    wide = facts.get("block_count") in _WIDE_HEADED
    return _gemma(facts) | {
        "sliding_window": facts.need("attention.sliding_window"),
        "query_pre_attn_scalar": per_head if wide else facts.get("attention.key_length", per_head),
        "attn_logit_softcapping": facts.get("attn_logit_softcapping"),
        "final_logit_softcapping": facts.get("final_logit_softcapping"),
    }


def _gemma3(facts: Facts) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": facts.get("rope.freq_base_swa", 10000.0)}
    ropes = {"full_attention": rope(facts), "sliding_attention": local}
    blocks = facts.need("block_count")
    # A period, or for each block whether it has a window.
    pattern = facts.file.metadata.get("gemma3.attention.sliding_window_pattern", 6)
    slides = pattern if isinstance(pattern, list) else [(index + 1) % pattern != 0 for index in range(blocks)]
    kinds = ["sliding_attention" if sliding else "full_attention" for sliding in slides]
    return _local(facts) | {"rope_parameters": ropes, "layer_types": kinds}


def _phi3(facts: Facts) -> dict[str, Any]:
    window = facts.get("attention.sliding_window") or None
    original = facts.get("rope.scaling.original_context_length", facts.need("context_length"))
    return {"sliding_window": window, "original_max_position_embeddings": original}


def _smollm3(facts: Facts) -> dict[str, Any]:
    blocks = facts.need("block_count")
    return _nothing(facts) | {"no_rope_layers": [int((index + 1) % 4 != 0) for index in range(blocks)]}


def _granite(facts: Facts) -> dict[str, Any]:
    keys = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {name: facts.need(key) for name, key in keys.items()}


ARCHS: Mapping[tuple[str, bool], Arch] = MappingProxyType(
    {
        ("llama", False): Arch("llama", interleaved=True),
        ("llama", True): Arch("mixtral", _mixtral, interleaved=True),
        ("qwen2", False): Arch("qwen2", _nothing),
        ("qwen3", False): Arch("qwen3", _nothing),
        ("qwen2moe", True): Arch("qwen2_moe", _qwen2_moe),
        ("qwen3moe", True): Arch("qwen3_moe", _qwen3_moe),
        ("gemma", False): Arch("gemma", _gemma),
        ("gemma2", False): Arch("gemma2", _local),
        ("gemma3", False): Arch("gemma3_text", _gemma3),
        ("phi3", False): Arch("phi3", _phi3),
        ("smollm3", False): Arch("smollm3", _smollm3, interleaved=True),
        ("olmo2", False): Arch("olmo2"),
        ("granite", False): Arch("granite", _granite, interleaved=True),
    }
)
"""(llama.cpp's architecture, whether the file has experts) -> what it is here."""


def arch_of(facts: Facts) -> Arch:
    """The row of a file; InputError lists the known architectures where there is none."""
    experts = bool(facts.get("expert_count", 0))
    found = ARCHS.get((facts.architecture, experts))
    if found is None:
        known = list(dict.fromkeys(name for name, _ in ARCHS))
        with_experts = " with experts" if experts else ""
        raise InputError(
            f"architecture '{facts.architecture}'{with_experts} is not known{nearest(facts.architecture, known)}",
            where=str(facts.file.path),
            fix=f"known: {', '.join(known)} (of these with experts: "
            f"{', '.join(name for name, experts in ARCHS if experts)}); give the original checkpoint",
        )
    return found


def config_of(facts: Facts, arch: Arch, tied: bool, token_ids: Mapping[str, int]) -> dict[str, Any]:
    """``config.json``; InputError lists keys that are missing. ``token_ids``: role (bos, eos, pad) -> id."""
    tensors, heads = facts.file.tensors, facts.need("attention.head_count")
    hidden = facts.need("embedding_length")
    head_dim = facts.get("attention.key_length", hidden // max(1, heads))
    config = {
        "model_type": arch.family,
        "dtype": "float32",
        "hidden_size": hidden,
        "intermediate_size": facts.get("feed_forward_length", 0) or facts.need("expert_feed_forward_length"),
        "num_hidden_layers": facts.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": facts.need("context_length"),
        "rms_norm_eps": facts.need("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope(facts),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "tie_word_embeddings": tied,
        "vocab_size": tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 0,
        **{f"{role}_token_id": token_ids.get(role) for role in ("bos", "eos", "pad")},
        **arch.config(facts),
    }
    problems = [f"{key}: missing" for key in dict.fromkeys(facts.missing)]
    if facts.get("attention.value_length", head_dim) != head_dim:
        problems.append("attention.value_length: heads of values are not as wide as those of keys")
    if problems:
        raise InputError("\n".join(problems), where=str(facts.file.path), fix="convert the model again")
    return config


def rope(facts: Facts) -> dict[str, Any]:
    """``rope_parameters``: base, scaling, and the share of a head that is rotated."""
    heads = max(1, facts.need("attention.head_count"))
    head_dim = facts.get("attention.key_length", facts.need("embedding_length") // heads)
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": facts.get("rope.freq_base", 10000.0)}
    rotated = facts.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    kind = facts.get("rope.scaling.type", "none")
    factor = facts.get("rope.scaling.factor") or facts.get("rope.scale_linear") or 1.0
    if kind == "none" and facts.get("rope.scale_linear"):
        kind = "linear"
    original = facts.get("rope.scaling.original_context_length")
    if kind not in ("none", "linear", "yarn", "longrope") or facts.get("rope.scaling.attn_factor", 1.0) != 1.0:
        attention = facts.get("rope.scaling.attn_factor")
        raise InputError(
            f"rope scaling '{kind}'{'' if attention is None else f' with attn_factor {attention:g}'} is not known",
            where=str(facts.file.path),
            fix="known: none, linear, yarn, longrope, and Llama 3's; give the original checkpoint",
        )
    if kind in ("linear", "yarn") and factor != 1.0:
        found |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            found["original_max_position_embeddings"] = original or facts.need("context_length")
    if ROPE_FREQUENCIES in facts.file.tensors:
        found |= _llama3(facts, found, head_dim)
    if all(name in facts.file.tensors for name in ROPE_FACTORS.values()):
        lists = {f"{kind}_factor": [decimal(v) for v in facts.tensor(name)] for kind, name in ROPE_FACTORS.items()}
        found |= {"rope_type": "longrope", **lists}
        found["original_max_position_embeddings"] = original or facts.need("context_length")
    return found


def _llama3(facts: Facts, plain: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """The parameters whose frequencies the file's factors are; InputError where none of the usual ones fit."""
    stored = facts.tensor(ROPE_FREQUENCIES)
    factor = float(stored.max())
    if factor == 1.0:
        return {}
    low, high = LLAMA3_FREQUENCIES
    frequencies = plain["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    for length in LLAMA3_LENGTHS:
        # Llama 3's scaling, as transformers computes it (modeling_rope_utils): waves longer than length / low are
        # slowed by the factor, those shorter than length / high stay, and between them it changes smoothly.
        smooth = np.clip((length * frequencies / (2 * np.pi) - low) / (high - low), 0, 1)
        wanted = 1 / ((1 - smooth) / factor + smooth)
        if len(stored) == len(wanted) and np.allclose(stored, wanted, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": decimal(factor),
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }
    raise InputError(
        f"{ROPE_FREQUENCIES} is no scaling of Llama 3's kind with the usual factors {low:g} and {high:g}",
        where=str(facts.file.path),
        fix="give the original checkpoint",
    )


def names_of(family: Family, architecture: str, blocks: int) -> dict[str, str]:
    """Name of each module in the checkpoint -> name of its tensor in a file, without suffix; by gguf-py's own tables.

    Routed experts lie in one tensor for each projection: their names have ``{expert}`` in them.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(number, blocks)
    inside: Sequence[str] = [*family.linears.values(), *family.norms.values(), *family.head_norms.values()]
    if (experts := family.experts) is not None:
        inside = [*inside, *experts.linears.values(), *experts.shared.values(), experts.router]
        inside += [experts.shared_gate] if experts.shared_gate else []
    modules = [f"{family.block.format(index=index)}.{name}" for index in range(blocks) for name in inside]
    outside = [family.embedding, family.final_norm, family.head]
    found = {name: table.get_name(name.replace(".{expert}", "")) for name in [*outside, *modules]}
    return {name: stored for name, stored in found.items() if stored is not None}


ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"mistral": "llama"} | {arch.family: architecture for (architecture, _), arch in ARCHS.items()}
)
"""Family -> the architecture that it is in llama.cpp."""
