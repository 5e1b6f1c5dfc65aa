"""The work directory gives back what was put in, one layer at a time, and never half a block."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compress.grid import round_to_nearest
from compress.scheme import QuantScheme
from compress.store import Store
from compress.tensor import QuantizedTensor


def rounded(text: str, rows: int = 6, columns: int = 70) -> QuantizedTensor:
    return round_to_nearest(torch.randn(rows, columns), QuantScheme.parse(text))


def same(one: QuantizedTensor, other: QuantizedTensor) -> bool:
    parts, others = one.tensors(), other.tensors()
    return (
        one.scheme == other.scheme
        and parts.keys() == others.keys()
        and all(torch.equal(part, others[name]) for name, part in parts.items())
    )


def test_gives_back_what_was_put_in(tmp_path: Path) -> None:
    store = Store(tmp_path / "blocks")
    first = {"a.q": rounded("int4-g32"), "a.k": rounded("int8-g32-asym"), "a.v": rounded("int2-channel")}
    second = {
        "b.q": rounded("int4-g32-asym"),
        "b.k": rounded("q4_k", columns=512),
        "b.v": rounded("q6_k", columns=512),
        "b.o": rounded("q5_1", columns=64),
        "b.up": rounded("mxfp4", columns=64),
    }
    store.put("a", first, {"a.norm.weight": torch.arange(5.0), "a.bias": torch.ones(3, dtype=torch.bfloat16)})
    store.put("b", second, {})
    assert list(store) == [*first, *second]
    for name, item in {**first, **second}.items():
        assert same(store.quantized(name), item)
        assert store.schemes[name] == item.scheme
    assert torch.equal(store.dense("a.norm.weight"), torch.arange(5.0))  # type: ignore[arg-type]
    assert store.dense("a.bias").dtype == torch.bfloat16  # type: ignore[union-attr]


def test_knows_nothing_of_other_names(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("a", {"a.q": rounded("int4-g32")}, {})
    assert store.dense("a.q") is None
    assert store.dense("a.q.weight") is None
    with pytest.raises(KeyError):
        store.quantized("a.k")


def test_rows_of_one_solve_are_stored_apart(tmp_path: Path) -> None:
    whole = rounded("int4-g32-asym", rows=10)
    assert whole.zero is not None
    parts = {
        name: QuantizedTensor(whole.scheme, whole.codes[rows], whole.scale[rows], whole.zero[rows])
        for name, rows in (("q", slice(0, 4)), ("k", slice(4, 10)))
    }
    store = Store(tmp_path)
    store.put("block", parts, {"transposed": torch.randn(4, 6).T})
    for name, part in parts.items():
        assert same(store.quantized(name), part)


def test_nothing_to_store_makes_no_file(tmp_path: Path) -> None:
    Store(tmp_path / "blocks").put("a", {}, {})
    assert not (tmp_path / "blocks").exists()


def test_a_write_that_fails_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old = rounded("int4-g32")
    store.put("a", {"a.q": old}, {})
    shared = torch.randn(4, 4)
    with pytest.raises(RuntimeError):
        store.put("a", {"a.q": rounded("int8-g32")}, {"one": shared, "two": shared})
    assert same(store.quantized("a.q"), old)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["a.safetensors"]


def test_putting_a_block_again_replaces_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("a", {"a.q": rounded("int4-g32")}, {})
    again = rounded("int8-g32")
    store.put("a", {"a.q": again}, {})
    assert same(store.quantized("a.q"), again)
    assert len(list(tmp_path.iterdir())) == 1
