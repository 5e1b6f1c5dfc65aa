"""Small real checkpoints and naive reference pieces that many tests share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from compress.models.topology import describe
from compress.scheme import CODEBOOKS, POWERS_OF_TWO, SUPER_BLOCK, QuantScheme
from compress.session import CompressedModel
from compress.store import Store
from compress.tensor import QuantizedTensor, expand_groups

SENTENCE = "The quick brown fox jumps over the lazy dog while seven wizards quietly mix 42 jars of potion."
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(folder: Path, chat_template: str | None = None) -> Any:
    """A byte-level BPE tokenizer of a few hundred tokens, trained on one sentence; no pad, no bos."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=281,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SENTENCE] * 4, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(folder)
    return wrapped


def tiny_llama(
    folder: Path,
    edit: Callable[[dict[str, Tensor]], None] | None = None,
    chat_template: str | None = None,
    **overrides: Any,
) -> Path:
    """A random two-block llama checkpoint with a tokenizer, float32 unless ``dtype`` says otherwise.

    ``edit`` may change the parameters (by their names) before they are saved.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    dtype = overrides.pop("dtype", torch.float32)
    torch.manual_seed(overrides.pop("seed", 0))
    model = LlamaForCausalLM(LlamaConfig(**(settings | overrides))).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The library's 0.02 initialisation makes every logit alike; real models are sharper.
            if parameter.ndim == 2:
                parameter.mul_(4.0 if "layers" in name else 8.0)
        if edit is not None:
            edit(dict(model.named_parameters()))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tiny_tokenizer(folder, chat_template)
    return folder


def naive_round(weight: Tensor, scheme: QuantScheme) -> QuantizedTensor:
    """Plain min/max rounding to nearest, with scales that fp16 holds and minima that fp16 holds too."""
    rows, columns = weight.shape
    width, groups = scheme.width(columns), scheme.groups(columns)
    padded = torch.nn.functional.pad(weight.float(), (0, groups * width - columns)).view(rows, groups, width)
    if scheme.block_type is not None:
        return _naive_blocks(padded, scheme)
    if scheme.codebook is not None:
        scale = padded.abs().amax(-1) / max(CODEBOOKS[scheme.codebook])
        scale = torch.where(scale == 0, 1.0, scale).half().float()
        if scheme.codebook in POWERS_OF_TWO:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        distances = weight[..., None] / expand_groups(scale, scheme, columns)[..., None] - torch.tensor(
            CODEBOOKS[scheme.codebook]
        )
        return QuantizedTensor(scheme, distances.abs().argmin(-1).to(torch.uint8), scale)
    if scheme.symmetric:
        scale = padded.abs().amax(-1) / scheme.midpoint
        scale = torch.where(scale == 0, 1.0, scale).half().float()
        zero = torch.full_like(scale, scheme.midpoint)
    else:
        low, high = padded.amin(-1).clamp(max=0), padded.amax(-1).clamp(min=0)
        scale = (high - low) / (scheme.levels - 1)
        scale = torch.where(scale == 0, 1.0, scale)
        exponent = torch.floor(torch.log2(scale))
        scale = torch.round(scale / 2 ** (exponent - 6)) * 2 ** (exponent - 6)
        zero = torch.round(-low / scale).clamp(0, scheme.levels - 1)
    centred = weight.float() / expand_groups(scale, scheme, columns) + expand_groups(zero, scheme, columns)
    codes = torch.round(centred).clamp(0, scheme.levels - 1).to(torch.uint8)
    return QuantizedTensor(scheme, codes, scale, None if scheme.symmetric else zero.to(torch.uint8))


def _naive_blocks(groups: Tensor, scheme: QuantScheme) -> QuantizedTensor:
    """``groups`` [rows, groups, width] by min/max; d and dmin just serve the largest scale and minimum."""
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if scheme.symmetric:
        scale, minimum = groups.abs().amax(-1) / (scheme.midpoint - 1), torch.zeros_like(low)
    else:
        scale, minimum = (high - low) / (scheme.levels - 1), -low
    d = dmin = None
    if (blocks := scheme.two_level) is None:
        scale, minimum = (scale + 2.0**-20).half().float(), minimum.half().float()
    else:
        scale, d = _naive_multiples(scale, SUPER_BLOCK // blocks.width, 1, blocks.scale_range[1])
        if blocks.minima:
            minimum, dmin = _naive_multiples(minimum, SUPER_BLOCK // blocks.width, 0, blocks.scale_range[1])
    middle = scheme.midpoint if scheme.symmetric else 0
    codes = torch.round((groups + minimum[..., None]) / scale[..., None] + middle).clamp(0, scheme.levels - 1)
    lies = None if scheme.symmetric else minimum
    return QuantizedTensor(scheme, codes.to(torch.uint8).flatten(1), scale, None, lies, d, dmin)


def _naive_multiples(values: Tensor, per_block: int, least: int, most: int) -> tuple[Tensor, Tensor]:
    """``values`` [rows, groups] as multiples of an fp16 number of each super-block, and that number."""
    each = values.view(len(values), -1, per_block)
    shared = (each.amax(-1) / most + 2.0**-20).half().float()
    whole = torch.round(each / shared[..., None]).clamp(least, most)
    return (whole * shared[..., None]).view_as(values), shared


def rounded_model(
    folder: Path,
    workdir: Path,
    scheme: str | None = "int4-g32",
    plan: Mapping[str, str | None] | None = None,
    ends: str | None = "int8-g32",
) -> CompressedModel:
    """The checkpoint in ``folder`` rounded naively: linears by ``scheme``, embedding and head by ``ends``.

    ``plan`` overrides single layers; None leaves a layer in floating point.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    spec = describe(config)
    chosen: dict[str, str | None] = dict.fromkeys(spec.ends, ends) | dict.fromkeys(spec.all_linears(), scheme)
    chosen |= plan or {}
    store = Store(workdir)
    for layer, text in chosen.items():
        if text is not None:
            quantized = naive_round(tensors[f"{layer}.weight"], QuantScheme.parse(text))
            store.put(layer, {layer: quantized}, {})
    shapes = {layer: (tensors[f"{layer}.weight"].shape[0], tensors[f"{layer}.weight"].shape[1]) for layer in chosen}
    return CompressedModel(config, folder, "tiny", spec.tied, shapes, store, tensors.__getitem__, tuple(tensors))


def fake_quantized(model: CompressedModel) -> Any:
    """The transformers model that computes what the artifact must: weights replaced by their dequantised codes."""
    from transformers import AutoModelForCausalLM

    torch_model = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()
    parameters = dict(torch_model.named_parameters())
    with torch.no_grad():
        for layer in model.schemes:
            parameters[f"{layer}.weight"].copy_(model.weight(layer))
    return torch_model


def mean_kld(reference: Tensor, other: Tensor) -> float:
    """Mean over positions of KL(reference || other) in nats, from logits [..., vocab]."""
    p = torch.log_softmax(reference.double(), -1)
    q = torch.log_softmax(other.double(), -1)
    return float((p.exp() * (p - q)).sum(-1).mean())
