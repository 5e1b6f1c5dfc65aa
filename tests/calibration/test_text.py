from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from calibration.builtin import builtin_texts
from calibration.errors import DataError
from calibration.text import Texts, TextSource, load_texts


def from_text(path: Path, encoding: str = "utf-8") -> Texts:
    return load_texts(TextSource("text", path=str(path), encoding=encoding), "calibration")


def from_rows(path: Path, *lines: str, column: str = "text") -> Texts:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return load_texts(TextSource("jsonl", path=str(path), column=column), "calibration")


def paragraphs(texts: Iterable[str]) -> set[str]:
    return {" ".join(paragraph.split()) for text in texts for paragraph in text.split("\n\n")}


def test_builtin_parts_share_no_paragraph() -> None:
    shared = paragraphs(builtin_texts("calibration")) & paragraphs(builtin_texts("evaluation"))
    assert not [paragraph for paragraph in shared if len(paragraph) > 60]


def test_builtin_text_is_large_and_the_same_in_another_process() -> None:
    calibration = load_texts(TextSource(), "calibration")
    evaluation = load_texts(TextSource(), "evaluation")
    # SmolLM2 makes a token of 4 characters; 128 and 48 windows of 512 are wanted at least.
    assert sum(map(len, calibration.texts)) > 128 * 512 * 4
    assert sum(map(len, evaluation.texts)) > 48 * 512 * 4
    code = "from calibration.text import *; print(load_texts(TextSource(), 'evaluation').sha256)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "7"},
    )
    assert run.stdout.strip() == evaluation.sha256 != calibration.sha256


def test_reading_sources_imports_no_heavy_library() -> None:
    code = (
        "import sys, calibration.windows; from calibration.text import *; load_texts(TextSource(), 'calibration');"
        "print(sorted({'torch', 'datasets', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_text_file_is_one_document_with_its_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "calib.txt"
    path.write_bytes("first\r\n\r\nsecond é\r\n".encode())
    assert from_text(path).texts == ("first\n\nsecond é\n",)


def test_a_folder_and_a_pattern_are_read_in_name_order(tmp_path: Path) -> None:
    for name, text in (("b.txt", "two"), ("a.txt", "one"), ("c.md", "three"), ("d.txt", " \n")):
        (tmp_path / name).write_text(text)
    texts = from_text(tmp_path)
    assert texts.texts == ("one", "two")
    assert texts.dropped == {"blank_files": 1}
    assert from_text(tmp_path / "[ac].*").texts == ("one", "three")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_is_stripped(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "calib.txt"
    path.write_bytes("\ufeffnaïve".encode(encoding) if encoding == "utf-8" else "naïve".encode(encoding))
    assert from_text(path, encoding).texts == ("naïve",)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_recognised_by_its_mark(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "calib.txt"
    path.write_bytes("\ufeffhello".encode(encoding))
    with pytest.raises(DataError, match="byte order mark of UTF-16") as caught:
        from_text(path)
    assert caught.value.where == str(path)
    assert "calibration.encoding: utf-16" in caught.value.fix
    assert from_text(path, "utf-16").texts == ("hello",)


def test_utf_16_without_a_mark_is_recognised_by_its_nul_bytes(tmp_path: Path) -> None:
    path = tmp_path / "calib.txt"
    path.write_bytes("hello".encode("utf-16-le"))
    with pytest.raises(DataError, match=r"NUL byte at offset 1 \(line 1\), 5 in the file") as caught:
        from_text(path)
    assert "utf-16-le" in caught.value.fix


def test_a_wrong_encoding_names_file_offset_line_and_what_to_set(tmp_path: Path) -> None:
    path = tmp_path / "calib.txt"
    path.write_bytes(b"plain\nThe \x93quoted\x94 word\n")
    with pytest.raises(DataError, match=r"byte 0x93 at offset 10 \(line 2\) is not utf-8") as caught:
        from_text(path)
    assert caught.value.where == str(path)
    assert "calibration.encoding: cp1252" in caught.value.fix
    assert "latin-1" in caught.value.fix
    assert from_text(path, "cp1252").texts == ("plain\nThe “quoted” word\n",)


def test_a_broken_utf_16_file_names_the_offset_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "calib.txt"
    path.write_bytes("\ufeffa\nbc".encode("utf-16-le") + b"\x00\xd8x\x00")
    with pytest.raises(DataError, match=r"at offset 10 \(line 2\) is not utf-16"):
        from_text(path, "utf-16")


def test_a_nul_byte_names_offset_and_line(tmp_path: Path) -> None:
    path = tmp_path / "calib.txt"
    path.write_bytes("é first\nsec\0ond\n".encode() * 3)
    with pytest.raises(DataError, match=r"NUL byte at offset 12 \(line 2\), 3 in the file") as caught:
        from_text(path)
    assert "utf-16" not in caught.value.fix


def test_every_bad_file_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfeh\x00")
    (tmp_path / "b.txt").write_text("fine")
    (tmp_path / "c.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"(?s)a\.txt.*UTF-16.*c\.txt.*0xe9 at offset 3"):
        from_text(tmp_path)


@pytest.mark.parametrize(("content", "counted"), [(b"", "1 empty files"), (b"\n \n\t\n", "1 blank files")])
def test_a_file_without_text_is_an_error(tmp_path: Path, content: bytes, counted: str) -> None:
    path = tmp_path / "calib.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=counted):
        from_text(path)


def test_a_missing_file_suggests_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "calib.txt").write_text("x")
    with pytest.raises(DataError, match=r"did you mean '.*calib\.txt'"):
        from_text(tmp_path / "calb.txt")


def test_an_unknown_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "calib.txt").write_text("x")
    for name in ("utf8-sigg", "base64"):
        with pytest.raises(DataError, match=f"no text encoding '{name}'"):
            from_text(tmp_path / "calib.txt", name)


def test_null_and_empty_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    texts = from_rows(tmp_path / "r.jsonl", '{"text": "one"}', '{"text": null}', '{"text": " "}', "", '{"text": "two"}')
    assert texts.texts == ("one", "two")
    assert texts.dropped == {"null_rows": 1, "empty_rows": 1, "blank_lines": 1}


def test_values_keep_their_type_and_other_columns_may_vary(tmp_path: Path) -> None:
    rows = [{"text": "2020-01-01", "meta": 1}, {"text": "2021-01-01\u2028", "meta": ["x"]}]
    texts = from_rows(tmp_path / "r.jsonl", *(json.dumps(row, ensure_ascii=False) for row in rows))
    assert texts.texts == ("2020-01-01", "2021-01-01\u2028")


def test_only_null_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 null rows"):
        from_rows(tmp_path / "r.jsonl", '{"text": null}', '{"text": null}')


def test_a_missing_column_lists_the_columns_there_are(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1 rows have no column 'text' \(line 2\); columns: text, id, txt") as caught:
        from_rows(tmp_path / "r.jsonl", '{"text": "a", "id": 1}', '{"txt": "b"}')
    assert "calibration.column" in caught.value.fix
    assert from_rows(tmp_path / "r.jsonl", '{"txt": "b"}', column="txt").texts == ("b",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 5}', "line 2: 'text' holds int 5, not text"),
        ('{"text": ["a"]}', r"line 2: 'text' holds list \[\"a\"\], not text"),
        ('{"text": "a"', "line 2 is not JSON: .* at column 13"),
        ('["a"]', "line 2 is a JSON list, not an object"),
        ('{"text": "a\\u0000"}', "line 2: 'text' has a NUL character at position 1"),
        ('{"text": "\\ud800"}', "line 2: 'text' has half of a surrogate pair"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_rows(tmp_path / "r.jsonl", '{"text": "fine"}', line)


def test_all_bad_rows_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)line 1:.*line 5:.*and 3 more"):
        from_rows(tmp_path / "r.jsonl", *['{"text": 1}'] * 8)


def test_a_json_array_is_told_from_json_lines(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="one JSON array"):
        from_rows(tmp_path / "r.jsonl", "[", '{"text": "a"}', "]")


def test_errors_of_the_evaluation_part_name_its_own_key(tmp_path: Path) -> None:
    path = tmp_path / "heldout.txt"
    path.write_bytes(b"\xe9")
    with pytest.raises(DataError) as caught:
        load_texts(TextSource("text", path=str(path)), "evaluation")
    assert "set evaluate.encoding" in caught.value.fix


def read_hub(home: Path, *sources: str) -> list[str]:
    """What each source gives, or its error; the hub's client reads its variables when it is imported."""
    code = (
        "from calibration.text import *\nfrom calibration.errors import DataError\n"
        f"for source in [{', '.join(f'TextSource({source})' for source in sources)}]:\n"
        "    try: print(load_texts(source, 'calibration').texts)\n"
        "    except DataError as error: print(str(error).replace('\\n', ' '))"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert run.stderr == ""
    assert not home.exists()
    return run.stdout.splitlines()


def test_the_hub_is_streamed_and_leaves_no_cache(tmp_path: Path) -> None:
    from datasets import Dataset

    folder = tmp_path / "data"
    folder.mkdir()
    Dataset.from_dict({"body": ["one", None, "", "two"]}).to_parquet(folder / "train.parquet")
    offline, texts, column, split = read_hub(
        tmp_path / "home",
        "'hub', name='Salesforce/wikitext', config='wikitext-2-raw-v1'",
        f"'hub', name={str(folder)!r}, column='body'",
        f"'hub', name={str(folder)!r}",
        f"'hub', name={str(folder)!r}, split='tst'",
    )
    assert "needs the network" in offline
    assert "source: text, path: FILE" in offline
    assert texts == "('one', 'two')"
    assert "there is no column 'text'; columns: body" in column
    assert "calibration.split" in split
