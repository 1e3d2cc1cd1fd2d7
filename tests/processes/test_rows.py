"""Rows of JSON: none is lost, torn or altered without a word."""

import json
import zlib

import pytest

from sparring.processes.rows import RowFile

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
        assert found == row and int(crc, 16) == zlib.crc32(json.dumps(found).encode())
    assert rows.read() == ROWS


def test_every_flipped_bit_is_found(rows):
    whole = rows.path.read_bytes()
    start, size = whole.index(b"\n") + 1, rows.size
    for place in range(start, whole.index(b"\n", start)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            rows.path.write_bytes(damaged)
            assert rows.read()[-3:] == ROWS[2:] and ROWS[1] not in rows.read()
            assert any("not as it was written" in what for what in rows.go_back(size))
            # nothing is removed but what came later
            assert rows.path.read_bytes() == damaged


def test_rows_after_a_checkpoint_go_and_those_before_stay(rows):
    size = rows.size
    rows.append([{"update": 6}])
    with rows.path.open("a") as file:
        file.write('{"torn')
    assert rows.go_back(size) == [] and rows.read() == ROWS


@pytest.mark.parametrize("left", range(0, 300, 7))
def test_what_is_lost_is_said_and_the_next_row_is_whole(rows, left):
    size, whole = rows.size, rows.path.read_bytes()
    rows.path.write_bytes(whole[:left])
    kept = whole[:left].count(b"\n")
    (said,) = rows.go_back(size)
    after = f"update {kept}" if kept else "the beginning"
    lost = size - (whole[:left].rfind(b"\n") + 1)
    assert said == f"rows after {after} are lost ({lost} bytes)"
    rows.append([{"update": 6}])
    assert rows.read() == [*ROWS[:kept], {"update": 6}]


def test_no_row_is_glued_to_a_torn_one(rows):
    rows.path.write_bytes(rows.path.read_bytes()[:-5])
    rows.append([{"update": 6}])
    assert rows.read() == [*ROWS[:-1], {"update": 6}]


def test_a_file_that_is_gone_has_lost_all(tmp_path):
    file = RowFile(tmp_path / "rows.jsonl")
    assert file.go_back(0) == [] and file.read() == [] and file.size == 0
    assert file.go_back(40) == ["rows after the beginning are lost (40 bytes)"]
    file.flush()
    assert not file.path.exists()


def test_some_are_kept(rows):
    with rows.path.open("ab") as file:
        file.write(b'[1]\n{"torn')
    rows.keep(lambda row: row["update"] < 3)
    assert rows.read() == ROWS[:2] and rows.path.read_bytes().endswith(b"}\n[1]\n")
