"""Whole commands on a GGUF file as the source model: files that we exported, compressed once more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from compress.__main__ import main
from compress.models.decoder import Decoder
from compress.models.sources import open_model
from compress.session import CompressedModel
from exporters.gguf import GgufExporter
from tests.compress.families import tokens_of
from tests.compress.runs import WORDS, Bench
from tests.support import TEMPLATE, rounded_model, tiny_llama

SCHEMES = ("int8-g32", "q4_k", "q6_k", "int4-g32-asym", "q2_k", None)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEPRESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def exported(folder: Path, scheme: str | None, **settings: Any) -> tuple[CompressedModel, Path]:
    """A rounded llama and the file of it."""
    checkpoint = tiny_llama(folder / "model", chat_template=TEMPLATE, **(WIDE | settings))
    model = rounded_model(checkpoint, folder / "work", scheme, ends="int8-g32" if scheme else None)
    (folder / "out").mkdir()
    artifact = GgufExporter().write(model, folder / "out")
    return model, artifact.path / artifact.entry


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_exported_file_is_the_model_with_the_same_numbers(scheme: str | None, tied: bool, tmp_path: Path) -> None:
    model, file = exported(tmp_path, scheme, tie_word_embeddings=tied, attention_bias=True)
    found = open_model(str(file))
    for layer in model.layers():
        wanted = model.weight(layer) if scheme else model.weight(layer).half().float()
        assert torch.equal(found.tensor(f"{layer}.weight"), wanted), layer
    tokens = tokens_of(2, 32) % 281
    if scheme:
        original = Decoder(open_model(str(model.folder)), model.parameter)
        assert torch.equal(*(torch.stack(list(decoder.logits(tokens))) for decoder in (original, Decoder(found))))
    mentioned = bool(found.remarks)
    assert mentioned == (scheme is not None)
    before, after = AutoTokenizer.from_pretrained(model.folder), AutoTokenizer.from_pretrained(found.folder)
    text = f"{' '.join(WORDS)} 123 \u00fc\U0001f600 <|endoftext|> I'll  go\n\n"
    assert before(text).input_ids == after(text).input_ids


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return exported(tmp_path / "source", "int4-g32-asym")[1]


def test_a_run_from_a_file_says_that_it_was_rounded_before(
    source: Path, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passes = "[{rotate: {}}, {gptq: {}}]"
    recipe = bench.file(tmp_path / "r.yaml", model=str(source), passes=passes, export="[onnx, gguf]", measure="false")
    assert main(["plan", str(recipe), "--json"]) == 0
    assert any("is quantised already" in line for line in json.loads(capsys.readouterr().out)["warnings"])
    assert main(["run", str(recipe), "--out", str(tmp_path / "out"), "--quiet", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "model.gguf is quantised already (14 tensors of Q4_1, 2 tensors of Q8_0)" in "\n".join(report["warnings"])
    assert [artifact["parity"]["mismatched"] for artifact in report["artifacts"]] == [[], []]
    assert all(artifact["quality"]["kld_mean"] < 0.2 for artifact in report["artifacts"])
    assert report["model"]["source"] == str(source)
    assert report["model"]["bytes"] == source.stat().st_size
    assert (tmp_path / "out" / "onnx" / "chat_template.jinja").read_text() == TEMPLATE


def test_the_same_scheme_again_is_lossless_and_an_eval_against_the_file_says_so(
    source: Path, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = bench.file(
        tmp_path / "r.yaml",
        model=str(source),
        passes="[{rtn: {scheme: int4-g32-asym, search: false}}]",
        export="[gguf]",
        measure="false",
        evaluate="false",
    )
    assert main(["run", str(recipe), "--out", str(tmp_path / "out"), "--quiet"]) == 0
    capsys.readouterr()
    again = tmp_path / "out" / "gguf" / "model.gguf"
    text = ["--source", "text", "--path", str(bench.folder / "evaluation.txt"), "--windows", "2"]
    command = ["eval", str(again), "--reference", str(source), *text, "--sequence-length", "32", "--json"]
    assert main(command) == 0
    # What is left is llama.cpp's rounding of activations.
    assert json.loads(capsys.readouterr().out)["kld_mean"] < 8e-3
    assert main(["inspect", str(source), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "gguf"


def test_a_run_is_resumed_only_from_the_same_file(
    source: Path, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = bench.file(tmp_path / "r.yaml", model=str(source), measure="false", export="[gguf]")
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("compress.engine.gather_evidence", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(["run", str(recipe), "--out", str(out), "--quiet"]) == 130
    kept = source.read_bytes()
    changed = bytearray(kept)
    changed[-5000] ^= 1
    source.write_bytes(bytes(changed))
    capsys.readouterr()
    assert main(["run", str(recipe), "--out", str(out), "--quiet", "--resume"]) == 2
    assert "weights (SHA-256)" in capsys.readouterr().err
    source.write_bytes(kept)
    assert main(["run", str(recipe), "--out", str(out), "--quiet", "--resume"]) == 0


def test_a_weight_that_is_not_finite_is_named(source: Path, bench: Bench, tmp_path: Path) -> None:
    from compress.errors import InputError
    from compress.models.checkpoint import scan_finite
    from compress.models.gguf.header import read_gguf

    info = read_gguf(source).tensors["blk.1.ffn_norm.weight"]
    data = bytearray(source.read_bytes())
    data[info.offset : info.offset + 4] = b"\x00\x00\xc0\x7f"
    source.write_bytes(bytes(data))
    with pytest.raises(
        InputError, match=r"model\.layers\.1\.post_attention_layernorm\.weight: 1 of 256 values are NaN"
    ):
        scan_finite(open_model(str(source)), lambda _: None)


def test_a_cache_that_cannot_be_written_is_an_input_error(source: Path, own_cache: Path) -> None:
    from compress.errors import InputError

    own_cache.write_text("a file where the folder should be")
    with pytest.raises(InputError, match="EDGEPRESS_CACHE"):
        open_model(str(source))
