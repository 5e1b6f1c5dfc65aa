"""A checkpoint on disk: read tensor by tensor, and every kind of damage said plainly before any work."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.errors import InputError
from compress.models import checkpoint as checkpoint_module
from compress.models.checkpoint import open_checkpoint, scan_finite
from compress.models.topology import describe
from tests.support import tiny_llama


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("original") / "tiny")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny"))


@pytest.fixture(scope="module")
def sharded(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    out = tmp_path_factory.mktemp("sharded") / "tiny"
    AutoModelForCausalLM.from_pretrained(original).save_pretrained(out, max_shard_size="100KB")
    return out


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_reads_each_tensor_by_name(original: Path, sharded: Path, kind: str) -> None:
    checkpoint = open_checkpoint(original if kind == "whole" else sharded)
    expected = load_file(original / "model.safetensors")
    assert set(checkpoint.files) == set(expected)
    assert checkpoint.name == "tiny"
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name), tensor)
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.dtype(name) == "F32"
    with pytest.raises(KeyError):
        checkpoint.tensor("model.layers.9.mlp.up_proj.weight")


def test_counts_the_bytes_of_every_weight_file_once(original: Path, sharded: Path) -> None:
    assert open_checkpoint(original).bytes == (original / "model.safetensors").stat().st_size
    assert len(shards_of(sharded)) > 2
    assert open_checkpoint(sharded).bytes == sum(path.stat().st_size for path in shards_of(sharded))


def test_no_such_folder(tmp_path: Path) -> None:
    assert "no such model folder" in refusal(tmp_path / "nowhere")


def test_a_file_is_not_a_folder(folder: Path) -> None:
    assert "no such model folder" in refusal(folder / "config.json")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe{\x00}\x00", b"[1, 2]", b'"llama"', b"null"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_damaged_names_its_file(sharded: Path, tmp_path: Path, name: str, content: bytes) -> None:
    copy = Path(shutil.copytree(sharded, tmp_path / "copy"))
    (copy / name).write_bytes(content)
    message = refusal(copy)
    assert name in message
    assert "JSON" in message


@pytest.mark.parametrize("content", [{}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_without_its_map(sharded: Path, tmp_path: Path, content: Any) -> None:
    copy = Path(shutil.copytree(sharded, tmp_path / "copy"))
    (copy / "model.safetensors.index.json").write_text(json.dumps(content))
    assert "no weight_map" in refusal(copy)


def test_every_damaged_shard_is_named_at_once(sharded: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(sharded, tmp_path / "copy"))
    gone, cut, empty, *_ = shards_of(copy)
    gone.unlink()
    cut.write_bytes(cut.read_bytes()[:-1])
    empty.write_bytes(b"")
    message = refusal(copy)
    assert f"{gone.name}: not there" in message
    assert f"{cut.name}: damaged" in message
    assert f"{empty.name}: damaged" in message


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_each_shard_may_be_the_truncated_one(sharded: Path, tmp_path: Path, share: float) -> None:
    for index, shard in enumerate(shards_of(sharded)):
        copy = Path(shutil.copytree(sharded, tmp_path / str(index)))
        content = shard.read_bytes()
        (copy / shard.name).write_bytes(content[: int(share * len(content))])
        assert f"{shard.name}: damaged" in refusal(copy)


def test_a_shard_that_is_another_one_lacks_what_the_index_promises(sharded: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(sharded, tmp_path / "copy"))
    first, second, *_ = shards_of(copy)
    shutil.copy(first, second)
    assert f"{second.name}: lacks " in refusal(copy)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_single_file(folder: Path, share: float) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: int(share * len(content))])
    assert "damaged safetensors file" in refusal(folder)


def test_a_pointer_instead_of_the_file_is_damage(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "damaged safetensors file" in refusal(folder)


def test_pickled_weights_alone_are_named_and_not_read(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    message = refusal(folder)
    assert "it has pytorch_model.bin" in message
    assert "save_pretrained" in message


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors" in refusal(folder)


def test_an_already_quantised_checkpoint_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    weight = tensors.pop("model.layers.0.mlp.up_proj.weight")
    tensors["model.layers.0.mlp.up_proj.qweight"] = weight.to(torch.int32)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    message = refusal(folder)
    assert "already quantised (gptq)" in message
    assert "model.layers.0.mlp.up_proj.qweight" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_without_their_scales_are_not_taken_for_weights(folder: Path, dtype: torch.dtype) -> None:
    from compress.models.decoder import Decoder

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(dtype)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"up_proj\.weight: \w+ is not a floating-point type"):
        Decoder(open_checkpoint(folder))


def test_an_unknown_family_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(
        InputError, match=r"'lama' is not supported; did you mean 'llama'(?s:.*)supported families: llama"
    ):
        describe({"model_type": "lama"}, "config.json")


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": 5}, {"model_type": ["llama"]}])
def test_a_config_without_a_family_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="supported families"):
        describe(config, "config.json")


# --- values that are not finite


def poison(folder: Path, *places: tuple[str, Any, float], dtype: torch.dtype | None = None) -> None:
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    for name, where, value in places:
        tensors[name][where] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def scan(folder: Path) -> list[int]:
    steps: list[int] = []
    scan_finite(open_checkpoint(folder), steps.append)
    return steps


DOWN, EMBEDDING, HEAD = "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "where", "value", "count"),
    [
        (DOWN, (3, 5), float("nan"), "1 of 6144 values"),
        (EMBEDDING, 200, float("inf"), "64 of 20480 values"),
        (HEAD, (0, 0), float("nan"), "1 of 20480 values"),
        ("model.norm.weight", 7, float("-inf"), "1 of 64 values"),
    ],
)
def test_values_that_are_not_finite_are_named_and_counted(
    folder: Path, dtype: torch.dtype, name: str, where: Any, value: float, count: str
) -> None:
    poison(folder, (name, where, value), dtype=dtype)
    with pytest.raises(InputError) as caught:
        scan(folder)
    assert f"{name}: {count} are NaN or infinite" in str(caught.value)
    assert caught.value.exit_code == 2
    assert str(folder) in str(caught.value)


def test_every_bad_tensor_is_listed_and_no_good_one(folder: Path) -> None:
    poison(folder, (DOWN, (3, 5), float("nan")), (HEAD, 1, float("inf")), (HEAD, 2, float("-inf")))
    with pytest.raises(InputError) as caught:
        scan(folder)
    lines = [line for line in str(caught.value).splitlines() if "are NaN or infinite" in line]
    assert sorted(lines) == [
        f"{HEAD}: 128 of 20480 values are NaN or infinite",
        f"{DOWN}: 1 of 6144 values are NaN or infinite",
    ]


def test_a_finite_checkpoint_passes_with_one_step_a_tensor(folder: Path) -> None:
    # Numbers near the end of float32 sum up beyond it: that is no fault.
    poison(folder, (DOWN, 0, 3e38), (DOWN, 1, 3e38))
    assert scan(folder) == [1] * len(load_file(folder / "model.safetensors"))


def test_the_checksum_is_that_of_names_types_and_numbers_in_whatever_files(tmp_path: Path) -> None:
    def checksum(name: str, **options: Any) -> str:
        folder = tiny_llama(tmp_path / name, **options)
        return scan_finite(open_checkpoint(folder), lambda _: None)

    one = checksum("one")
    assert checksum("again") == one
    tensors = load_file(tmp_path / "one/model.safetensors")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/config.json").write_text((tmp_path / "one/config.json").read_text())
    names = sorted(tensors, reverse=True)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"shards/{number}.safetensors")
    held = {name: f"{place % 2}.safetensors" for place, name in enumerate(names)}
    (tmp_path / "shards/model.safetensors.index.json").write_text(json.dumps({"weight_map": held}))
    assert scan_finite(open_checkpoint(tmp_path / "shards"), lambda _: None) == one
    others = [checksum("other", seed=1), checksum("bfloat16", dtype=torch.bfloat16)]
    poison(tmp_path / "one", (DOWN, (0, 0), 0.25))
    assert len({one, *others, scan_finite(open_checkpoint(tmp_path / "one"), lambda _: None)}) == 4


def test_pages_that_were_read_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "UNMAP_BYTES", 1 << 24)
    shapes = {"num_hidden_layers": 1, "vocab_size": 320}
    folder = tiny_llama(tmp_path / "model", **shapes)
    tensors = {f"{number}.weight": torch.zeros(1 << 22) for number in range(16)}
    save_file(tensors, folder / "model.safetensors")
    del tensors
    gc.collect()
    before, most = psutil.Process().memory_info().rss, 0

    def look(_: int) -> None:
        nonlocal most
        most = max(most, psutil.Process().memory_info().rss - before)

    scan_finite(open_checkpoint(folder), look)
    # 256 MiB in all, 16 a tensor.
    assert most < 1 << 27
