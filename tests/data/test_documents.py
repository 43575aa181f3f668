import hashlib
import json
import re

import pyarrow as pa
import pyarrow.parquet
import pytest

from looplab.data.documents import DataError, Document, Grid, cut_at_blank_lines, drop_duplicates, read_documents


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name, data):
    with open(name, "wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())
    return name


def lines(*records):
    return "".join(json.dumps(r) + "\n" for r in records)


def table(name, **columns):
    pa.parquet.write_table(pa.table(columns), name)
    return name


def error_of(path, **options):
    with pytest.raises(DataError) as caught:
        read_documents(path, **options)
    return str(caught.value)


def test_a_text_is_cut_at_blank_lines_once_a_piece_has_2000_characters():
    blocks = ["a" * 1200, "  indented\nb" + "b" * 900, "c" * 1999, "d"]
    text = f"\n\n{blocks[0]}\n \t\n\n{blocks[1]}\n\n{blocks[2]}\n\n{blocks[3]}\n"
    found = read_documents(write("m.txt", text)).documents
    assert [d.text for d in found] == [f"{blocks[0]}\n\n{blocks[1]}", f"{blocks[2]}\n\n{blocks[3]}"]
    assert [d.line for d in found] == [3, 9]


@pytest.mark.parametrize(("sizes", "pieces"), [([1998], 1), ([2000, 1], 2), ([1999, 1], 1), ([999, 999], 1)])
def test_a_piece_ends_exactly_when_it_has_enough_characters(sizes, pieces):
    assert len(list(cut_at_blank_lines("\n\n".join("x" * n for n in sizes)))) == pieces


def test_joining_characters_count_for_the_length_of_a_piece():
    text = "\n\n".join(["x" * 999, "y" * 999, "z"])  # the first two and their joint have exactly 2,000
    assert [len(d.text) for d in cut_at_blank_lines(text)] == [2000, 1]


def test_windows_line_ends_and_a_byte_order_mark_change_nothing():
    plain = read_documents(write("a.txt", "one\ntwo\n\nthree"))
    windows = read_documents(write("b.txt", b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree"))
    assert plain.documents == windows.documents
    assert plain.hash != windows.hash


def test_jsonl_and_parquet_hold_the_same_documents():
    records = [
        {"text": "a\u2028b", "prompt": "p", "group": "g"},  # U+2028 is no line end of the file
        {"text": "second", "prompt": None, "group": None},
    ]
    from_lines = read_documents(
        write("m.jsonl", json.dumps(records[0], ensure_ascii=False) + "\n\n" + lines(records[1]))
    )
    columns = {name: [r[name] for r in records] for name in ("text", "prompt", "group")}
    from_rows = read_documents(table("m.parquet", **columns, other=[1, 2]))
    assert from_lines.documents == from_rows.documents == (Document("a\u2028b", "p", "g"), Document("second"))
    assert [d.line for d in from_lines.documents] == [1, 3]
    assert [d.line for d in from_rows.documents] == [1, 2]


def test_the_text_field_can_have_another_name():
    assert read_documents(write("m.jsonl", lines({"body": "x"})), text_field="body").documents == (Document("x"),)
    assert read_documents(table("m.parquet", body=["x"]), text_field="body").documents == (Document("x"),)


def test_grids_are_read_from_jsonl_and_parquet():
    record = {"tokens": [1, 2], "labels": [-100, 3], "puzzle_id": 7, "group": "g"}
    expected = (Grid((1, 2), (-100, 3), 7, "g"),)
    assert read_documents(write("g.jsonl", lines(record))).documents == expected
    assert read_documents(table("g.parquet", **{k: [v] for k, v in record.items()})).documents == expected
    assert read_documents(write("h.jsonl", lines({"tokens": [5], "labels": [5]}))).documents == (Grid((5,), (5,)),)


def test_the_key_ignores_unicode_form_and_white_space_only():
    composed, decomposed = Document("caf\u00e9  au\n lait "), Document("cafe\u0301 au lait")
    assert composed.key == decomposed.key
    assert composed.key == hashlib.sha256("\0caf\u00e9 au lait".encode()).hexdigest()
    assert Document("Cafe\u0301 au lait").key != composed.key
    assert Document("b", prompt="a").key != Document("a b").key != Document("ab").key


def test_documents_of_a_group_share_the_key_but_are_no_duplicates():
    first, second, alone = Document("a", group="g"), Document("b", group="g"), Document("a")
    assert first.key == second.key != alone.key
    assert first.content_key == alone.content_key != second.content_key
    assert drop_duplicates([first, second, Document(" a", line=3), second]) == [first, second]


@pytest.mark.parametrize(
    ("tokens", "labels", "message"),
    [
        (
            (1, 2),
            (1,),
            "a grid must have 'tokens' and 'labels' of equal length, at least 1. Got 2 and 1 (line 7). "
            "Give every token a label; -100 is not scored.",
        ),
        (
            (),
            (),
            "a grid must have 'tokens' and 'labels' of equal length, at least 1. Got 0 and 0 (line 7). "
            "Give every token a label; -100 is not scored.",
        ),
        (
            (1, -100),
            (1, -100),
            "a grid must have ids from 0, and -100 where a label is not scored. Got -100 (line 7). Correct the ids.",
        ),
        (
            (1, 2),
            (-100, -3),
            "a grid must have ids from 0, and -100 where a label is not scored. Got -3 (line 7). Correct the ids.",
        ),
    ],
)
def test_a_grid_that_cannot_be_scored_is_refused_however_it_is_made(tokens, labels, message):
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        Grid(tokens, labels, line=7)


def test_grids_are_the_same_when_their_tokens_are():
    assert Grid((1, 2), (3, 4)).key == Grid((1, 2), (5, 6), 9).key != Grid((2, 1), (3, 4)).key


def test_the_hash_is_that_of_the_bytes():
    before = read_documents(write("m.txt", "one"))
    assert before.hash == read_documents(write("n.txt", "one")).hash
    assert before.hash != read_documents(write("m.txt", "one ")).hash


def test_a_missing_file_is_named_as_the_user_named_it():
    expected = "--data math=m.jsonl: no such file. Give a .txt, .jsonl or .parquet path."
    assert error_of("m.jsonl", option="--data math=m.jsonl") == expected
    assert error_of("m.jsonl") == "m.jsonl: no such file. Give a .txt, .jsonl or .parquet path."


def test_folders_and_other_formats_are_refused(tmp_path):
    (tmp_path / "d.txt").mkdir()
    assert error_of("d.txt") == "d.txt: a folder. Give a .txt, .jsonl or .parquet path."
    assert error_of(write("m.csv", "x")) == "m.csv: format '.csv' is not read. Give a .txt, .jsonl or .parquet path."


GOOD = json.dumps({"text": "ok"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', "string 'text'. Got keys ['body']. Rename the field or use --text-field."),
        ('{"text": 3}', "string 'text'. Got a value of type int. Repair the line."),
        ('{"text": "a", "prompt": 3}', "string 'prompt'. Got a value of type int. Repair the line."),
        ('{"text": "a", "group": 3}', "string 'group'. Got a value of type int. Repair the line."),
        ("[1]", "string 'text'. Got a value of type list. Repair the line."),
        ('{"text": ', "string 'text'. Got text that is not JSON (Expecting value, column 10). Repair the line."),
        (r'{"text": "\ud800"}', "string 'text'. Got half of a surrogate pair. Repair the line."),
    ],
)
def test_a_broken_line_is_named_or_skipped_and_counted(line, message):
    path = write("m.jsonl", "\n".join([GOOD] * 16 + [line, GOOD]))
    assert error_of(path) == f"m.jsonl line 17 must be a JSON object with a {message}"
    skipping = read_documents(path, on_bad_line="skip")
    assert (len(skipping.documents), skipping.skipped) == (17, 1)


def test_numbers_too_long_and_nesting_too_deep_are_broken_lines():
    for line in ('{"text": ' + "1" * 5000 + "}", "[" * 200_000):
        assert error_of(write("m.jsonl", line)).startswith("m.jsonl line 1 must be a JSON object with a string 'text'.")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"tokens": [1, 2], "labels": [1]},
            "must have 'tokens' and 'labels' of equal length, ids from 0 (label -100: not scored). "
            "Got 2 entries and 1 entries. Repair the line.",
        ),
        (
            {"tokens": [-1], "labels": "x"},
            "must have 'tokens' and 'labels' of equal length, ids from 0 (label -100: not scored). "
            "Got 1 entries and 'x'. Repair the line.",
        ),
        (
            {"tokens": [], "labels": []},
            "must have 'tokens' and 'labels' of equal length, ids from 0 (label -100: not scored). "
            "Got 0 entries and 0 entries. Repair the line.",
        ),
        (
            {"tokens": [2**31], "labels": [1]},
            "must have 'tokens' and 'labels' of equal length, ids from 0 (label -100: not scored). "
            "Got 1 entries and 1 entries. Repair the line.",
        ),
        (
            {"tokens": [1], "labels": [1], "puzzle_id": "7"},
            "must have a whole number 'puzzle_id'. Got '7'. Repair the line.",
        ),
        (
            {"tokens": [1], "labels": [1], "group": 7},
            "must be a JSON object with a string 'group'. Got 7. Repair the line.",
        ),
    ],
)
def test_a_broken_grid_is_named(record, message):
    assert error_of(write("g.jsonl", lines(record))) == f"g.jsonl line 1 {message}"


@pytest.mark.parametrize(("record", "label"), [([1], -1), ([True], 0)])
def test_only_minus_100_marks_an_unscored_label_and_ids_are_whole_numbers(record, label):
    assert "must have 'tokens' and 'labels'" in error_of(write("g.jsonl", lines({"tokens": record, "labels": [label]})))


@pytest.mark.parametrize("name", ["m.txt", "m.jsonl"])
def test_bytes_that_are_no_utf8_are_named_with_their_offset(name):
    path = write(name, b"x" * 1032 + b"\xff")
    assert error_of(path) == f"{name} must be UTF-8. Byte 0xff at offset 1032. Re-encode the file."


def test_parquet_errors_are_named():
    assert error_of(table("m.parquet", body=["x"])) == (
        "m.parquet must have a string column 'text'. Got columns ['body']. Rename the column or use --text-field."
    )
    assert error_of(table("m.parquet", text=["x", None])) == (
        "m.parquet row 2 must be a JSON object with a string 'text'. Got a value of type NoneType. Repair the line."
    )
    assert error_of(table("m.parquet", text=pa.array([b"a\xff"]).view(pa.string()))) == (
        "m.parquet must be UTF-8. Byte 0xff at offset 1. Re-encode the file."
    )
    assert error_of(write("m.parquet", "text")).startswith("m.parquet must be a parquet file. Got: ")


@pytest.mark.parametrize(("name", "text"), [("m.txt", " \n\n"), ("m.jsonl", "\n")])
def test_a_file_without_documents_is_an_error(name, text):
    assert error_of(write(name, text)) == (
        f"{name} must hold at least one document. Got an empty file. Add text or give another file."
    )


def test_a_file_of_skipped_lines_only_is_an_error():
    assert error_of(write("m.jsonl", "1\n2\n"), on_bad_line="skip") == (
        "m.jsonl must hold at least one document. Got 2 lines, all left out. Add text or give another file."
    )
