"""Rows of JSON: none is lost, torn or altered without a word."""

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


def test_a_row_is_json_with_the_checksum_of_the_others(rows):
    for line, row in zip(rows.path.read_text().splitlines(), ROWS, strict=True):
        found = json.loads(line)
        crc = found.pop("crc")
        # as docs/outputs.md says
        assert found == row | {"row": row["update"]} and int(crc, 16) == zlib.crc32(json.dumps(found).encode())
    assert rows.read() == ROWS


def test_every_flipped_bit_is_found(rows):
    whole = rows.path.read_bytes()
    start = whole.index(b"\n") + 1
    for place in range(start, whole.index(b"\n", start)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            rows.path.write_bytes(damaged)
            assert rows.read()[-3:] == ROWS[2:] and ROWS[1] not in rows.read()
            assert any("altered" in what for what in rows.rewind(5))
            # nothing is removed but what came later
            assert rows.path.read_bytes() == damaged


def test_rows_after_a_checkpoint_go_and_those_before_stay(rows):
    rows.append([{"update": 6}])
    with rows.path.open("a") as file:
        file.write('{"torn')
    assert rows.rewind(5) == [] and rows.read() == ROWS


@pytest.mark.parametrize("left", range(0, 300, 7))
def test_what_is_lost_is_said_and_the_next_row_is_whole(rows, left):
    whole = rows.path.read_bytes()
    rows.path.write_bytes(whole[:left])
    kept = whole[:left].count(b"\n")
    (said,) = rows.rewind(5)
    after = f"update {kept}" if kept else "the beginning"
    assert said == f"rows after {after} are lost ({5 - kept} of 5)"
    rows.append([{"update": 6}])
    assert rows.read() == [*ROWS[:kept], {"update": 6}]


def test_no_row_is_glued_to_a_torn_one(rows):
    rows.path.write_bytes(rows.path.read_bytes()[:-5])
    rows.append([{"update": 6}])
    assert rows.read() == [*ROWS[:-1], {"update": 6}]


def test_a_file_that_is_gone_has_lost_all(tmp_path):
    file = RowFile(tmp_path / "rows.jsonl")
    assert file.rewind(0) == [] and file.read() == [] and file.last == 0
    assert file.rewind(4) == ["rows after the beginning are lost (4 of 4)"]
    file.flush()
    assert not file.path.exists()


@pytest.mark.parametrize("text", [b"{oops}", b"{\xff}", b'{"a": ' + b"[" * 3000 + b"}", b'{"a": ' + b"9" * 5000 + b"}"])
def test_what_only_has_the_right_checksum_is_passed_over(rows, text):
    """Anybody can work a CRC out, for anything."""
    whole = text[:-1] + b', "row": 6}'
    with rows.path.open("ab") as file:
        file.write(b'%s, "crc": "%08x"}\n' % (whole[:-1], zlib.crc32(whole)))
    assert rows.read() == ROWS and rows.last == 6
    assert rows.rewind(7) == ["rows after update 5 are lost (1 of 7)"]


def test_some_are_kept(rows):
    with rows.path.open("ab") as file:
        file.write(b'[1]\n{"torn')
    rows.keep(lambda row: row["update"] < 3)
    assert rows.read() == ROWS[:2] and rows.path.read_bytes().endswith(b"}\n[1]\n")


def shuffled(rows, order):
    lines = rows.path.read_text().splitlines(keepends=True)
    rows.path.write_text("".join(lines[number - 1] if number else "torn\n" for number in order))


@pytest.mark.parametrize(
    ("order", "said", "read"),
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
def test_rows_that_are_missing_twice_or_out_of_place_are_told(rows, order, said, read):
    shuffled(rows, order)
    assert rows.rewind(5) == said and [row["update"] for row in rows.read()] == read


def test_rows_go_on_with_the_next_number_whatever_is_damaged(rows):
    shuffled(rows, [1, 2, 3, 0, 0])
    # more of it than is looked through first
    with rows.path.open("ab") as file:
        file.write(b"x" * 70_000 + b"\n")
    rows.append([{"update": 4}])
    assert rows.last == 4 and [row["update"] for row in rows.read()] == [1, 2, 3, 4]


def test_rows_after_a_checkpoint_go_also_where_earlier_ones_are_missing(rows):
    shuffled(rows, [1, 3, 4, 5])
    assert rows.rewind(3) == ["rows missing: 2"] and [row["update"] for row in rows.read()] == [1, 3]
    assert rows.rewind(2) == ["rows after update 1 are lost (1 of 2)"] and rows.last == 1


def test_nothing_is_appended_through_a_link(tmp_path):
    (tmp_path / "rows.jsonl").symlink_to("other")
    with pytest.raises(OSError, match="a link"):
        RowFile(tmp_path / "rows.jsonl").append([{"update": 1}])
    assert not (tmp_path / "other").exists()


def test_every_flipped_bit_of_a_document_is_found(tmp_path):
    document, file = Document(tmp_path / "x.json"), tmp_path / "x.json"
    content = {"state": "finished", "name": "grün", "best": {"rate": 1 / 3, "update": 7}, "none": None}
    document.write(content)
    assert document.read() == (content, None)
    whole = file.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            file.write_bytes(damaged)
            found, wrong = document.read()
            # without its checksum it is believed: what it says is what was written
            assert wrong or {name: value for name, value in found.items() if name in content} == content
    file.unlink()
    assert document.read() == ({}, "x.json is missing")
