"""Importance matrices: written from our statistics, read by rtn and by llama.cpp's own quantiser."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import libgguf
import numpy as np
import pytest
import torch

from calibration.stats import InputStats
from compress.__main__ import main
from compress.errors import InputError
from compress.fingerprint import fingerprint
from compress.importance import collect
from compress.models.gguf.imatrix import entry_of, misfits, read_imatrix, write_imatrix
from compress.models.topology import describe
from compress.passes.rtn import Rtn
from compress.prepare import prepare
from compress.recipe import Calibration
from compress.scheme import QuantScheme
from compress.texts import text_windows
from tests.compress.families import Watch, compressed, saved
from tests.compress.gguf_files import tensors, written
from tests.compress.runs import Bench
from tests.support import tiny_llama, tiny_tokenizer

F32 = np.float32


def section(bench: Bench, samples: int = 4) -> Calibration:
    return Calibration(source="text", path=bench.folder / "calibration.txt", samples=samples, sequence_length=64)


def described(folder: Path) -> Any:
    return describe(json.loads((folder / "config.json").read_text()))


def statistics(folder: Path, workdir: Path, tokens: torch.Tensor) -> Mapping[str, InputStats]:
    """What every layer of the unquantised model is fed."""
    watch = Watch()
    compressed(folder, workdir, [watch], tokens)
    return watch.seen


@pytest.mark.parametrize("variant", ["llama", "qwen3_moe", "phi3", "mixtral"])
def test_a_written_matrix_has_the_statistics_of_every_layer(variant: str, bench: Bench, tmp_path: Path) -> None:
    from compress.models.sources import open_model
    from compress.texts import token_windows

    folder = saved(variant, tmp_path / "model", tie_word_embeddings=False)
    tiny_tokenizer(folder)
    asked = section(bench)
    found = collect(str(folder), asked, tmp_path / "m.gguf")
    seen = statistics(folder, tmp_path / "work", token_windows(open_model(str(folder)), asked, "calibration").tokens)
    imatrix, entries = read_imatrix(tmp_path / "m.gguf"), entry_of(described(folder))
    assert entries.keys() == seen.keys()
    assert {name for name, _ in entries.values()} == set(imatrix.sums)
    assert (imatrix.chunk_count, imatrix.chunk_size, found.tokens) == (4, 64, 256)
    assert "calibration.txt" in imatrix.datasets[0]
    for layer, (name, matrix) in entries.items():
        squares = imatrix.mean_squares(name, matrix)
        if seen[layer].tokens == 0:
            assert squares is None
            assert layer in found.unseen
        else:
            assert squares is not None
            np.testing.assert_allclose(squares, seen[layer].importance.numpy(), rtol=1e-5)


def test_the_file_is_what_gguf_py_reads_as_llama_imatrix_writes_it(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    entries = {
        "blk.0.ffn_gate_exps.weight": (random.random((3, 64), F32), np.array([5, 0, 7], F32)),
        "blk.0.attn_q.weight": (random.random((1, 32), F32), np.array([12], F32)),
    }
    write_imatrix(tmp_path / "m.gguf", entries, ["one.txt", "two.txt"], 3, 512)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    facts = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert facts == {
        "general.type": "imatrix",
        "imatrix.datasets": ["one.txt", "two.txt"],
        "imatrix.chunk_count": 3,
        "imatrix.chunk_size": 512,
    }
    found = {item.name: item for item in reader.tensors}
    assert len(found) == 4
    for name, (sums, counts) in entries.items():
        # gguf-py gives shapes as ggml does, innermost first.
        assert found[f"{name}.in_sum2"].shape.tolist() == [sums.shape[1], len(sums)]
        assert found[f"{name}.counts"].shape.tolist() == [1, len(sums)]
        np.testing.assert_array_equal(found[f"{name}.in_sum2"].data, sums)
        np.testing.assert_array_equal(found[f"{name}.counts"].data[:, 0], counts)
    imatrix = read_imatrix(tmp_path / "m.gguf")
    np.testing.assert_array_equal(
        imatrix.mean_squares("blk.0.ffn_gate_exps.weight", 2), entries["blk.0.ffn_gate_exps.weight"][0][2] / F32(7)
    )
    assert imatrix.mean_squares("blk.0.ffn_gate_exps.weight", 1) is None


def quantised_by_llama_cpp(source: Path, out: Path, imatrix: Path | None, ftype: int) -> dict[str, Any]:
    """Name -> tensor of gguf-py's reader, of ``source`` quantised by llama.cpp's own code."""
    from compress.runner.llama_library import library as loaded

    library, _ = loaded()
    settings = library.llama_model_quantize_default_params()
    settings.ftype, settings.nthread, settings.pure = ftype, 1, True
    if imatrix is not None:
        opened = read_imatrix(imatrix)
        values = {name: opened.mean_squares(name) for name in opened.sums}
        arrays = (library.llama_model_imatrix_data * (len(values) + 1))()
        for entry, (name, squares) in zip(arrays, values.items(), strict=False):
            assert squares is not None
            entry.name, entry.size = name.encode(), squares.size
            entry.data = squares.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        settings.imatrix = ctypes.cast(arrays, ctypes.POINTER(library.llama_model_imatrix_data))
    assert library.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(settings)) == 0
    return {item.name: item for item in gguf.GGUFReader(out).tensors}


def test_llama_cpps_quantiser_takes_what_we_wrote(bench: Bench, tmp_path: Path) -> None:
    import llama_cpp

    folder, file = written("llama", tmp_path)
    collect(str(folder), section(bench), tmp_path / "m.gguf")
    kind, number = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, gguf.GGMLQuantizationType.Q4_0
    plain = quantised_by_llama_cpp(file, tmp_path / "plain.gguf", None, kind)
    weighed = quantised_by_llama_cpp(file, tmp_path / "weighed.gguf", tmp_path / "m.gguf", kind)
    imatrix = read_imatrix(tmp_path / "m.gguf")
    arrays = tensors(folder, json.loads((folder / "config.json").read_text()))
    for name in imatrix.sums:
        if name not in arrays or weighed[name].tensor_type != number:
            continue
        values = np.ascontiguousarray(arrays[name])
        wanted = libgguf.quantize_rows(values, number, imatrix.mean_squares(name))
        np.testing.assert_array_equal(weighed[name].data, wanted)
        assert not np.array_equal(weighed[name].data, plain[name].data)
    assert sum(item.tensor_type == number for item in weighed.values()) >= 14


def test_rtn_weighs_by_the_matrix_and_says_what_it_lacks(bench: Bench, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model")
    tokens = torch.randint(0, 281, (4, 64), generator=torch.Generator().manual_seed(0))
    seen = statistics(folder, tmp_path / "watch", tokens)
    entries = entry_of(described(folder))
    rows = {
        entries[layer][0]: (stats.gram.diagonal().numpy()[None], np.array([stats.tokens], F32))
        for layer, stats in seen.items()
    }
    rows["blk.0.ffn_up.weight"] = (np.zeros((1, 64), F32), np.zeros(1, F32))
    del rows["blk.1.attn_v.weight"]
    write_imatrix(tmp_path / "m.gguf", rows, ["x"], 4, 64)
    scheme = QuantScheme.parse("int4-g32")
    runs = {
        name: compressed(folder, tmp_path / name, [step], tokens)
        for name, step in {"plain": Rtn(scheme), "weighed": Rtn(scheme, importance=tmp_path / "m.gguf")}.items()
    }
    told = {layer.layer: layer.fallback for layer in runs["weighed"].done[0].layers if layer.fallback}
    assert told == {
        "model.layers.0.mlp.up_proj": "no token reached it in the importance matrix",
        "model.layers.1.self_attn.v_proj": "no entry in the importance matrix",
    }

    def error(name: str, layer: str) -> float:
        model, weight = runs[name].model, runs[name].checkpoint.tensor(f"{layer}.weight")
        lost = model.quantized(layer).dequantize() - weight
        return float((lost.square() * seen[layer].importance).sum())

    for layer in seen:
        if layer in told or layer == "lm_head":
            continue
        assert error("weighed", layer) < error("plain", layer), layer
    for layer in told:
        assert error("weighed", layer) == error("plain", layer)


def test_a_matrix_of_another_model_is_refused_with_every_difference(bench: Bench, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model")
    moe = saved("qwen3_moe", tmp_path / "moe")
    one = np.ones(1, F32)
    rows = {
        "blk.0.attn_q.weight": (np.ones((1, 64), F32), one),
        "blk.1.attn_q.weight": (np.ones((1, 48), F32), one),
        "blk.2.attn_q.weight": (np.ones((1, 64), F32), one),
        "blk.0.ffn_gate_exps.weight": (np.ones((4, 64), F32), np.ones(4, F32)),
        "blk.0.ffn_gate_inp.weight": (np.ones((1, 64), F32), one),
        "output.weight": (np.ones((1, 64), F32), one),
    }
    write_imatrix(tmp_path / "m.gguf", rows, ["x"], 1, 1)
    imatrix = read_imatrix(tmp_path / "m.gguf")
    shapes = dict.fromkeys(entry_of(described(folder)), (64, 64))
    assert misfits(imatrix, described(folder), shapes) == [
        "blk.0.ffn_gate_exps.weight: the model has no such weight",
        "blk.1.attn_q.weight: 1 x 48 inputs, and the model has 1 x 64",
        "blk.2.attn_q.weight: the model has no such weight",
    ]
    shapes = dict.fromkeys(entry_of(described(moe)), (64, 64))
    assert "blk.0.ffn_gate_exps.weight: 4 x 64 inputs, and the model has 6 x 64" in misfits(
        imatrix, described(moe), shapes
    )


def test_a_recipe_with_the_wrong_file_is_an_input_error(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_imatrix(tmp_path / "m.gguf", {"blk.9.attn_q.weight": (np.ones((1, 64), F32), np.ones(1, F32))}, [], 1, 1)
    for file, message in (
        (tmp_path / "m.gguf", "blk.9.attn_q.weight: the model has no such weight"),
        (tmp_path / "none.gguf", "there is no such file"),
    ):
        recipe = bench.file(tmp_path / "r.yaml", passes=f"[{{rtn: {{importance: {file}}}}}]")
        assert main(["plan", str(recipe)]) == 2
        assert message in capsys.readouterr().err
    recipe = bench.file(tmp_path / "r.yaml", passes=f"[{{rtn: {{importance: {file}, search: false}}}}]")
    assert main(["plan", str(recipe)]) == 2
    assert "only the search for scales weighs weights" in capsys.readouterr().err


def damaged(path: Path, arrays: Mapping[str, Any], kind: str = "imatrix") -> Path:
    writer = gguf.GGUFWriter(path, "")
    writer.add_type(kind)
    for name, values in arrays.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_damaged_matrices_are_refused_with_all_that_is_wrong(tmp_path: Path) -> None:
    path, good = tmp_path / "m.gguf", np.ones((1, 32), F32)
    bad = good.copy()
    bad[0, 3], bad[0, 5] = np.nan, -1
    arrays = {
        "a.in_sum2": good,
        "b.counts": np.ones((1, 1), F32),
        "c.in_sum2": good,
        "c.counts": np.ones((2, 1), F32),
        "d.in_sum2": bad,
        "d.counts": np.ones((1, 1), F32),
        "e.weight": good,
    }
    with pytest.raises(InputError) as caught:
        read_imatrix(damaged(path, arrays))
    assert caught.value.what.splitlines() == [
        "e.weight: neither .in_sum2 nor .counts",
        "a: has one of .in_sum2 and .counts only",
        "b: has one of .in_sum2 and .counts only",
        "c: F32 [1, 32] and F32 [2, 1] are no float32 sums and counts",
        "d: 2 values are negative or not finite",
    ]
    with pytest.raises(InputError, match=r"its general\.type is 'model', not imatrix"):
        read_imatrix(damaged(path, arrays, "model"))
    path.write_bytes(b"\x03\x00\x00\x00\x10\x00\x00\x00blk.0.attn_q.weight")
    with pytest.raises(InputError, match="no GGUF file"):
        read_imatrix(path)


def test_the_command_writes_the_file_once(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.gguf"
    text = ["--source", "text", "--path", str(bench.folder / "calibration.txt"), "--samples", "2"]
    command = ["imatrix", str(bench.model), "--out", str(out), *text, "--sequence-length", "32", "--quiet"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["entries"], found["tokens"], found["chunks"], found["unseen"]) == (15, 64, 2, [])
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    assert main(command) == 2
    assert "the file is there already" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert "entries" in capsys.readouterr().out
    assert main([*command[:3], str(tmp_path / "none" / "m.gguf"), *command[4:]]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    recipe = bench.file(tmp_path / "r.yaml", passes=f"[{{rtn: {{importance: {out}}}}}]", measure="false")
    assert main(["run", str(recipe), "--out", str(tmp_path / "run"), "--quiet", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["artifacts"][0]["parity"]["mismatched"] == []
    assert report["warnings"] == []


def test_a_run_is_gone_on_with_only_with_the_same_file(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    entries = {"blk.0.attn_q.weight": (np.ones((1, 64), F32), np.ones(1, F32))}
    found = []
    for count in (1, 2):
        write_imatrix(file, entries, ["x"], count, 1)
        prepared, _, _ = prepare(bench.recipe(passes=f"[{{rtn: {{importance: {file}}}}}]"))
        found.append(fingerprint(prepared, text_windows(prepared)[0], "weights"))
    assert [name for name in found[0] if found[0][name] != found[1][name]] == ["passes.rtn.importance (SHA-256)"]
