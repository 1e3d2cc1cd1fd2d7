"""Rows of JSON: lost, torn and altered rows are reported."""

import json
import zlib

import pytest

from sparring.processes.rows import Document, RowFile

ROWS = [{"update": number, "loss": number / 3, "reward": None, "name": "grün"} for number in range(1, 6)]


@pytest.fixture
def rows(tmp_path):
    file = RowFile(tmp_path / "rows.jsonl")
    for row in ROWS:
        file.append([row])
    return file


def test_row_is_json_with_a_number_and_a_checksum(rows):
    for line, row in zip(rows.path.read_text().splitlines(), ROWS, strict=True):
        found = json.loads(line)
        crc = found.pop("crc")
        # the format of docs/outputs.md
        assert found == row | {"row": row["update"]} and int(crc, 16) == zlib.crc32(json.dumps(found).encode())
    assert rows.read() == ROWS


def test_flipped_bits_of_a_row_are_found(rows):
    whole = rows.path.read_bytes()
    start = whole.index(b"\n") + 1
    for position in range(start, whole.index(b"\n", start)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            rows.path.write_bytes(damaged)
            assert rows.read()[-3:] == ROWS[2:] and ROWS[1] not in rows.read()
            assert any("altered" in what for what in rows.rewind(5))
            # only later rows are removed
            assert rows.path.read_bytes() == damaged


def test_rewind_removes_rows_after_a_checkpoint(rows):
    rows.append([{"update": 6}])
    with rows.path.open("a") as file:
        file.write('{"torn')
    assert rows.rewind(5) == [] and rows.read() == ROWS


@pytest.mark.parametrize("left", range(0, 300, 7))
def test_lost_rows_are_reported_and_the_next_row_is_intact(rows, left):
    whole = rows.path.read_bytes()
    rows.path.write_bytes(whole[:left])
    kept = whole[:left].count(b"\n")
    (messages,) = rows.rewind(5)
    after = f"update {kept}" if kept else "the beginning"
    assert messages == f"rows after {after} are lost ({5 - kept} of 5)"
    rows.append([{"update": 6}])
    assert rows.read() == [*ROWS[:kept], {"update": 6}]


def test_row_after_a_torn_line_is_intact(rows):
    rows.path.write_bytes(rows.path.read_bytes()[:-5])
    rows.append([{"update": 6}])
    assert rows.read() == [*ROWS[:-1], {"update": 6}]


def test_missing_file_has_lost_all_rows(tmp_path):
    file = RowFile(tmp_path / "rows.jsonl")
    assert file.rewind(0) == [] and file.read() == [] and file.last == 0
    assert file.rewind(4) == ["rows after the beginning are lost (4 of 4)"]
    file.flush()
    assert not file.path.exists()


@pytest.mark.parametrize("text", [b"{oops}", b"{\xff}", b'{"a": ' + b"[" * 3000 + b"}", b'{"a": ' + b"9" * 5000 + b"}"])
def test_invalid_json_with_a_valid_checksum_is_skipped(rows, text):
    """A valid CRC does not prove valid JSON."""
    whole = text[:-1] + b', "row": 6}'
    with rows.path.open("ab") as file:
        file.write(b'%s, "crc": "%08x"}\n' % (whole[:-1], zlib.crc32(whole)))
    assert rows.read() == ROWS and rows.last == 6
    assert rows.rewind(7) == ["rows after update 5 are lost (1 of 7)"]


def test_keep_removes_rows_by_condition(rows):
    with rows.path.open("ab") as file:
        file.write(b'[1]\n{"torn')
    rows.keep(lambda row: row["update"] < 3)
    assert rows.read() == ROWS[:2] and rows.path.read_bytes().endswith(b"}\n[1]\n")


def shuffled(rows, order):
    lines = rows.path.read_text().splitlines(keepends=True)
    rows.path.write_text("".join(lines[number - 1] if number else "torn\n" for number in order))


@pytest.mark.parametrize(
    ("order", "messages", "read"),
    [
        ([1, 3, 4, 5], ["rows missing: 2"], [1, 3, 4, 5]),
        ([1, 5], ["rows missing: 2-4"], [1, 5]),
        ([2, 4, 5], ["rows missing: 1, 3"], [2, 4, 5]),
        ([1, 2, 2, 3, 4, 5], ["out of place: row 2 again"], [1, 2, 3, 4, 5]),
        ([1, 2, 2, 4, 5], ["rows missing: 3", "out of place: row 2 again"], [1, 2, 4, 5]),
        ([1, 0, 2, 3, 4, 5], ["out of place: a line after row 1"], [1, 2, 3, 4, 5]),
        ([2, 3, 0, 5], ["row 4 is altered", "rows missing: 1"], [2, 3, 5]),
        ([1, 0, 0, 4, 0], ["rows 2, 3, 5 are altered"], [1, 4]),
        ([1, 0, 3, 4, 5], ["row 2 is altered"], [1, 3, 4, 5]),
        ([1, 0, 4, 5], ["row 2 is altered", "rows missing: 3"], [1, 4, 5]),
        ([1, 2, 3, 4, 0], ["row 5 is altered"], [1, 2, 3, 4]),
        ([1, 2, 3, 4, 5, 1, 2], [], [1, 2, 3, 4, 5]),
        ([5, 4, 3, 2, 1], ["rows missing: 1-4"], [5]),
    ],
)
def test_missing_repeated_and_misplaced_rows_are_reported(rows, order, messages, read):
    shuffled(rows, order)
    assert rows.rewind(5) == messages and [row["update"] for row in rows.read()] == read


def test_row_numbers_continue_after_damage(rows):
    shuffled(rows, [1, 2, 3, 0, 0])
    # longer than the block that is read first
    with rows.path.open("ab") as file:
        file.write(b"x" * 70_000 + b"\n")
    rows.append([{"update": 4}])
    assert rows.last == 4 and [row["update"] for row in rows.read()] == [1, 2, 3, 4]


def test_rewind_works_with_missing_rows(rows):
    shuffled(rows, [1, 3, 4, 5])
    assert rows.rewind(3) == ["rows missing: 2"] and [row["update"] for row in rows.read()] == [1, 3]
    assert rows.rewind(2) == ["rows after update 1 are lost (1 of 2)"] and rows.last == 1


def test_append_does_not_follow_a_link(tmp_path):
    (tmp_path / "rows.jsonl").symlink_to("other")
    with pytest.raises(OSError, match="a link"):
        RowFile(tmp_path / "rows.jsonl").append([{"update": 1}])
    assert not (tmp_path / "other").exists()


def test_flipped_bits_of_a_document_are_found(tmp_path):
    document, file = Document(tmp_path / "x.json"), tmp_path / "x.json"
    content = {"state": "finished", "name": "grün", "best": {"rate": 1 / 3, "update": 7}, "none": None}
    document.write(content)
    assert document.read() == (content, None)
    whole = file.read_bytes()
    for position in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            file.write_bytes(damaged)
            found, wrong = document.read()
            # a document without checksum is accepted; its content must be unchanged
            assert wrong or {name: value for name, value in found.items() if name in content} == content
    file.unlink()
    assert document.read() == ({}, "x.json is missing")
