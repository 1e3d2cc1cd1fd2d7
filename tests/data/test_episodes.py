"""The store compared with a list; crashes at every byte; a writer that is killed, and one with concurrent readers."""

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
import torch
from doubles import LinearPolicy, counting_env
from doubles_episodes import assert_equal, numbered_episode
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.collect.collector import Collector
from sparring.data.episodes import EpisodeRecorder, EpisodeStore
from sparring.data.windows import ShuffledWindows
from sparring.envs.backend import EpisodeSeeds
from sparring.errors import UserError


def filled(folder, lengths=(3, 1, 5), **options) -> EpisodeStore:
    store = EpisodeStore(folder, **options)
    for number, steps in enumerate(lengths):
        store.append(numbered_episode(number, steps), source="random", seed=number)
    return store


def assert_holds(store: EpisodeStore, expected: list[tuple[int, int]]) -> None:
    """Exactly these (number, steps), in this order."""
    assert len(store) == len(expected)
    assert store.num_steps == sum(steps for _, steps in expected)
    for i, (number, steps) in enumerate(expected):
        assert store.numbers[i] == number and store.position(number) == i
        assert_equal(store.episode(i), numbered_episode(number, steps))


@pytest.fixture
def logged(caplog):
    """The log, also if another test has disabled propagation of the library's logger."""
    logger = logging.getLogger("sparring.data")
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


operations = st.lists(
    st.one_of(st.integers(1, 12), st.sampled_from(["reopen", "rewind", "refresh"])), min_size=1, max_size=25
)


@settings(max_examples=40, deadline=None)
@given(operations, st.sampled_from([1, 3000, 1 << 20]))
def test_behaves_like_a_list_over_segments_and_reopenings(ops, segment_bytes):
    with tempfile.TemporaryDirectory() as folder:
        store = EpisodeStore(folder, segment_bytes=segment_bytes)
        reader = EpisodeStore(folder, read_only=True)
        model: list[tuple[int, int]] = []
        for op in ops:
            if op == "reopen":
                store.close()
                store = EpisodeStore(folder, segment_bytes=segment_bytes)
            elif op == "refresh":
                reader.refresh()
                assert_holds(reader, model)
            elif op == "rewind":
                model = model[: len(model) // 2]
                store.rewind(len(model))
                reader = EpisodeStore(folder, read_only=True)
            else:
                assert store.append(numbered_episode(len(model), op)) == len(model)
                model.append((len(model), op))
            assert_holds(store, model)
        store.close()
        assert_holds(EpisodeStore(folder, read_only=True), model)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=20, max_size=30), st.integers(15_000, 18_000))
def test_a_limit_deletes_the_oldest_segments_completely(lengths, max_bytes):
    with tempfile.TemporaryDirectory() as folder:
        store = EpisodeStore(folder, max_bytes=max_bytes)
        for number, steps in enumerate(lengths):
            store.append(numbered_episode(number, steps))
            on_disk = sum(f.stat().st_size for f in Path(folder).glob("segment-*"))
            assert on_disk == store.bytes() <= max_bytes
            kept = list(enumerate(lengths[: number + 1]))[-len(store) :]
            assert_holds(store, kept)
        # at most a segment, i.e. an eighth, and the size of the last episode were deleted
        if len(store) < len(lengths):
            assert store.bytes() > 0.7 * max_bytes
        store.close()
        assert_holds(EpisodeStore(folder, read_only=True), kept)


def test_an_episode_that_can_never_fit_is_refused(tmp_path):
    with pytest.raises(UserError, match="set max_bytes to "):
        filled(tmp_path, (200,), max_bytes=10_000)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sampled_from([1, 1 << 20]))
def test_a_crash_at_any_byte_loses_the_last_episode_only(data, lengths, segment_bytes):
    with tempfile.TemporaryDirectory() as folder:
        filled(folder, lengths, segment_bytes=segment_bytes).close()
        paths = sorted(Path(folder).glob("segment-*"))
        before = {p: 0 for p in paths}
        filled_folder = Path(folder, "one_less")
        filled(filled_folder, lengths[:-1], segment_bytes=segment_bytes).close()
        before |= {Path(folder, p.name): p.stat().st_size for p in filled_folder.glob("segment-*")}
        # a killed writer leaves part of the data and no line, or all of the data and part of the line
        index, block = paths[-1], paths[-2]
        assert index.suffix == ".index" and block.suffix == ".data"
        if data.draw(st.booleans(), label="in the data"):
            os.truncate(index, before[index])
            os.truncate(block, data.draw(st.integers(before[block], block.stat().st_size), label="cut"))
        else:
            os.truncate(index, data.draw(st.integers(before[index], index.stat().st_size - 1), label="cut"))
        whole = list(enumerate(lengths[:-1]))
        assert_holds(EpisodeStore(folder, read_only=True), whole)
        store = EpisodeStore(folder, segment_bytes=segment_bytes)
        assert_holds(store, whole)
        store.append(numbered_episode(len(whole), 9))
        store.close()
        assert_holds(EpisodeStore(folder, read_only=True), [*whole, (len(whole), 9)])


@pytest.mark.parametrize("segment_bytes", [1, 1 << 20])
@pytest.mark.parametrize("kept", [0, 1, 20, 2000])
def test_lost_steps_are_logged_in_one_line(tmp_path, logged, segment_bytes, kept):
    filled(tmp_path, (4, 3, 30), segment_bytes=segment_bytes).close()
    *_, data, index = sorted(tmp_path.glob("segment-*"))
    line = index.read_bytes().splitlines(keepends=True)[-1]
    start = int(re.search(rb'"offset": (\d+)', line)[1])
    os.truncate(index, index.stat().st_size - len(line))
    os.truncate(data, start + kept)
    logged.clear()
    EpisodeStore(tmp_path, segment_bytes=segment_bytes).close()
    # without a header the number of steps is unknown
    steps = 30 if kept >= 16 else 0
    expected = f"{tmp_path}: dropped an incomplete last episode: {steps} steps lost, {kept} bytes of them written"
    assert [r.getMessage() for r in logged.records] == ([expected] if kept else [])
    logged.clear()
    EpisodeStore(tmp_path, segment_bytes=segment_bytes).close()
    assert logged.records == []


def test_data_that_never_reached_the_disk_fail_their_checksum_and_are_dropped(tmp_path, logged):
    """A power failure may keep the line and lose the data: zeros, or a file that is too short."""
    filled(tmp_path, (4, 3, 30)).close()
    (data,) = tmp_path.glob("*.data")
    with open(data, "r+b") as file:
        file.seek(-3000, os.SEEK_END)
        file.write(bytes(2000))
    with pytest.raises(UserError, match="data of episode 2 is damaged, .* open the folder once without read_only"):
        EpisodeStore(tmp_path, read_only=True)
    logged.clear()
    store = EpisodeStore(tmp_path)
    assert_holds(store, [(0, 4), (1, 3)])
    assert "30 steps lost" in logged.text
    store.append(numbered_episode(2, 8))
    store.close()
    os.truncate(data, data.stat().st_size - 1)
    assert_holds(EpisodeStore(tmp_path), [(0, 4), (1, 3)])
    assert "8 steps lost" in logged.text


def overwrite(path: Path, position: int, size: int = 150) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(b"\xa5" * size)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


LENGTHS = [1 + k * 7 % 11 for k in range(20)]


def damaged_data(folder, store):
    segment, record = store.locate(8)
    overwrite(segment.data_path, record.offset + record.size // 2, 15)
    return [8], "data of episode 8 is damaged"


def damaged_index(folder, store):
    segment = store.locate(8)[0]
    lines = segment.index_path.read_bytes().splitlines(keepends=True)
    overwrite(segment.index_path, sum(map(len, lines[: segment.records.index(store.locate(8)[1])])) + 20, 5)
    return [8], "is damaged, and "


def missing_index(folder, store):
    segment = store.locate(8)[0]
    segment.index_path.unlink()
    return [r.number for r in segment.records], "index': is missing, but its data file exists"


def truncated_index(folder, store):
    segment = store.locate(-1)[0]
    lines = segment.index_path.read_bytes().splitlines(keepends=True)
    os.truncate(segment.index_path, len(b"".join(lines[:-2])))
    return [r.number for r in segment.records[-2:]], "but the data file contains 2 more"


def missing_data(folder, store):
    segment = store.locate(8)[0]
    segment.data_path.unlink()
    return [r.number for r in segment.records], "data' is missing; copy the folder again"


def damaged_checksums(folder, store):
    for i in range(20):
        segment, record = store.locate(i)
        overwrite(segment.data_path, record.end - 80, 10)
    return list(range(20)), "damaged, and so are all 20 of the segment"


@pytest.mark.parametrize(
    ("damage", "segment_bytes"),
    [
        (damaged_data, 1 << 20),
        (damaged_index, 1 << 20),
        (damaged_index, 4000),
        (missing_index, 1 << 20),
        (missing_index, 4000),
        (truncated_index, 1 << 20),
        (missing_data, 4000),
        (damaged_checksums, 1 << 20),
    ],
)
def test_damage_is_refused_and_repair_keeps_all_intact_episodes_and_all_bytes(tmp_path, logged, damage, segment_bytes):
    store = filled(tmp_path, LENGTHS, segment_bytes=segment_bytes)
    lost, message = damage(tmp_path, store)
    store.close()
    before = contents(tmp_path)
    for options in ({}, {"read_only": True}):
        # for a reader this may be a writer at work
        if options and damage is truncated_index:
            continue
        with pytest.raises(UserError, match=re.escape(message)) as refused:
            EpisodeStore(tmp_path, **options)
        assert "EpisodeStore(folder, repair=True)" in str(refused.value)
    assert contents(tmp_path) == before
    logged.clear()
    whole = [(number, steps) for number, steps in enumerate(LENGTHS) if number not in lost]
    store = EpisodeStore(tmp_path, repair=True, segment_bytes=segment_bytes)
    assert_holds(store, whole)
    counts = f"{len(whole)} complete episodes ({sum(steps for _, steps in whole)} steps)"
    kept = f"kept {counts}; moved the rest of {len(lost)} "
    assert kept in logged.text
    # all old bytes still exist in some file
    after = contents(tmp_path)
    for name, old in before.items():
        pieces = [new for other, new in after.items() if other.startswith((name, f"damaged/{name}"))]
        assert old in (*pieces, b"".join(pieces)), name
    number = store.next_number
    store.append(numbered_episode(number, 9))
    store.close()
    assert_holds(EpisodeStore(tmp_path), [*whole, (number, 9)])


def test_damage_in_an_old_segment_is_found_by_repair(tmp_path):
    store = filled(tmp_path, LENGTHS, segment_bytes=4000)
    damaged_data(tmp_path, store)
    store.close()
    reader = EpisodeStore(tmp_path, read_only=True)
    assert len(reader) == 20
    # other episodes can be read, this one cannot
    assert_equal(reader.episode(7), numbered_episode(7, LENGTHS[7]))
    for read in (lambda: reader.episode(8), lambda: ShuffledWindows(reader, 4).sample(200, torch.Generator())):
        with pytest.raises(UserError, match="the data of episode 8 is damaged.*EpisodeStore\\(folder, repair=True\\)"):
            read()
    store = EpisodeStore(tmp_path, repair=True)
    assert_holds(store, [(n, steps) for n, steps in enumerate(LENGTHS) if n != 8])
    store.close()
    with pytest.raises(UserError, match="read_only=True forbids"):
        EpisodeStore(tmp_path, read_only=True, repair=True)


@pytest.mark.parametrize(
    "file", ["meta.json", *(f"segment-00000{k}.{kind}" for k in (0, 1) for kind in ("data", "index"))]
)
def test_one_flipped_bit_is_never_returned_as_data(tmp_path, logged, file):
    """Refused at opening or reading; or a possibly torn end is dropped and logged; or the content is unchanged."""
    lengths = (3, 1, 5, 2, 6)
    filled(tmp_path / "good", lengths, segment_bytes=2000).close()
    assert len(list((tmp_path / "good").glob("*.data"))) == 3
    generator, refused = np.random.default_rng(0), 0
    for round_ in range(25):
        shutil.copytree(tmp_path / "good", folder := tmp_path / str(round_))
        data = bytearray((folder / file).read_bytes())
        data[generator.integers(len(data))] ^= 1 << int(generator.integers(8))
        (folder / file).write_bytes(data)
        logged.clear()
        try:
            with contextlib.closing(EpisodeStore(folder)) as store:
                found = [store.episode(i).clone() for i in range(len(store))]
        except UserError as error:
            refused += str(folder) in str(error)
            continue
        if len(found) < len(lengths):
            assert "dropped an incomplete last episode" in logged.text
        for number, episode in enumerate(found):
            assert_equal(episode, numbered_episode(number, lengths[number]))
    # changed white space in meta.json has no effect
    assert refused >= (8 if file == "meta.json" else 25)


def pipe(folder):
    (folder / "segment-000001.data").unlink()
    os.mkfifo(folder / "segment-000001.data")


def link(folder):
    (folder / "segment-000001.index").rename(folder / "elsewhere")
    (folder / "segment-000001.index").symlink_to("elsewhere")


def directory(folder):
    (folder / "meta.json").unlink()
    (folder / "meta.json").mkdir()


def renamed(folder):
    for kind in ("index", "data"):
        files = [folder / f"segment-00000{k}.{kind}" for k in range(2)]
        for old, new in zip(files, (folder / "x", files[0]), strict=True):
            old.rename(new)
        (folder / "x").rename(files[1])


def duplicated_line(folder):
    lines = (folder / "segment-000000.index").read_bytes().splitlines(keepends=True)
    (folder / "segment-000000.index").write_bytes(b"".join([*lines, lines[0]]))


def another_column(folder):
    described = (folder / "meta.json").read_text()
    (folder / "meta.json").write_text(described.replace("float32", "float64"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (pipe, "segment-000001.data' is not a regular file"),
        (link, "segment-000001.index' is not a regular file"),
        (directory, "meta.json' is not a regular file"),
        (renamed, "begins with episode 0, but the previous segment ends with "),
        (duplicated_line, "index': line . does not continue the previous one: lines missing or moved"),
        (another_column, "its checksum does not match its columns"),
    ],
)
def test_files_that_were_changed_or_replaced_are_refused(tmp_path, damage, message):
    filled(tmp_path, (3, 1, 5, 2, 6), segment_bytes=2000).close()
    damage(tmp_path)
    for options in ({}, {"read_only": True}):
        with pytest.raises(UserError, match=message):
            EpisodeStore(tmp_path, **options)


LINES = {
    "removed": lambda lines, k: lines[:k] + lines[k + 1 :],
    "twice": lambda lines, k: lines[: k + 1] + lines[k:],
    "moved to the end": lambda lines, k: [*lines[:k], *lines[k + 1 :], lines[k]],
    "moved to the start": lambda lines, k: [lines[k], *lines[:k], *lines[k + 1 :]],
}


@pytest.mark.parametrize("way", LINES)
@pytest.mark.parametrize("line", [0, 1, 2])
@pytest.mark.parametrize("segment", [0, 1, 2])
def test_no_line_is_removed_doubled_or_moved_without_a_message(tmp_path, logged, segment, line, way):
    """Three segments of three episodes: refused, but for a last line that a crash may have torn, which is reported."""
    store = filled(tmp_path, (3,) * 3)
    segment_bytes = store.bytes()
    store.close()
    shutil.rmtree(tmp_path)
    filled(tmp_path, (3,) * 9, segment_bytes=segment_bytes).close()
    index = tmp_path / f"segment-00000{segment}.index"
    lines = index.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3 and len(list(tmp_path.glob("*.index"))) == 3
    changed = LINES[way](lines, line)
    index.write_bytes(b"".join(changed))
    if changed == lines:
        return
    before = contents(tmp_path)
    may_be_torn = (segment, line, way) == (2, 2, "removed")
    for options in ({"read_only": True}, {}):
        logged.clear()
        if may_be_torn:
            found = EpisodeStore(tmp_path, **options)
            assert_holds(found, [(n, 3) for n in range(8)])
            found.close()
            (record,) = logged.records
            assert record.levelname == "WARNING" and re.search("3 steps (lost|of an episode)", record.getMessage())
            continue
        wanted = "does not continue|the data file contains"
        with pytest.raises(UserError, match=f"segment-00000{segment}.index': .*({wanted}).*repair=True"):
            EpisodeStore(tmp_path, **options)
        assert contents(tmp_path) == before
    if may_be_torn:
        return
    whole = [(n, 3) for n in range(9) if way != "removed" or n != 3 * segment + line]
    EpisodeStore(tmp_path, repair=True).close()
    assert_holds(EpisodeStore(tmp_path, read_only=True), whole)
    # a second repair changes nothing, and lines that the first one kept cannot be removed either
    before = contents(tmp_path)
    EpisodeStore(tmp_path, repair=True).close()
    assert contents(tmp_path) == before
    kept = index.read_bytes().splitlines(keepends=True)
    for removed in range(len(kept) - (segment == 2)):
        index.write_bytes(b"".join(kept[:removed] + kept[removed + 1 :]))
        with pytest.raises(UserError, match=wanted):
            EpisodeStore(tmp_path)


def test_a_missing_segment_is_logged(tmp_path, logged):
    filled(tmp_path, (3, 3, 3, 3), segment_bytes=1).close()
    for file in tmp_path.glob("segment-000001.*"):
        file.unlink()
    assert_holds(EpisodeStore(tmp_path, read_only=True), [(0, 3), (2, 3), (3, 3)])
    assert "episodes 1 to 1 are missing" in logged.text


def test_a_reader_logs_that_it_ignores_a_damaged_last_line(tmp_path, logged):
    filled(tmp_path).close()
    index = tmp_path / "segment-000000.index"
    overwrite(index, index.stat().st_size - 20, 5)
    assert_holds(EpisodeStore(tmp_path, read_only=True), [(0, 3), (1, 1)])
    assert "segment-000000.index: the last line is damaged; its episode is ignored" in logged.text


def test_deleted_episodes_of_a_checkpoint_are_logged(tmp_path, logged):
    store = filled(tmp_path, (3, 3, 3), segment_bytes=1)
    state = store.state_dict()
    store.close()
    for file in tmp_path.glob("segment-000000.*"):
        file.unlink()
    store = EpisodeStore(tmp_path)
    store.load_state_dict(state)
    assert "episodes 0 to 0 of the checkpoint were deleted" in logged.text
    # as earlier versions wrote it
    store.load_state_dict({"next_number": 2})
    assert_holds(store, [(1, 3)])


def test_a_description_without_a_checksum_is_read(tmp_path):
    """As earlier versions wrote it."""
    filled(tmp_path, (3, 1)).close()
    content = json.loads((tmp_path / "meta.json").read_text())
    del content["checksum"]
    (tmp_path / "meta.json").write_text(json.dumps(content))
    assert_holds(EpisodeStore(tmp_path), [(0, 3), (1, 1)])


def test_a_repair_without_damage_changes_nothing(tmp_path):
    filled(tmp_path, LENGTHS, segment_bytes=4000).close()
    before = contents(tmp_path)
    EpisodeStore(tmp_path, repair=True).close()
    assert contents(tmp_path) == before


def test_several_torn_last_episodes_are_counted(tmp_path, logged):
    store = filled(tmp_path, (4, 3, 30, 5))
    segment, record = store.locate(2)
    store.close()
    overwrite(segment.data_path, record.offset + 500)
    overwrite(segment.data_path, record.end + 100)
    logged.clear()
    assert_holds(EpisodeStore(tmp_path), [(0, 4), (1, 3)])
    assert "dropped the 2 incomplete last episodes: 35 steps lost" in logged.text


@pytest.mark.parametrize("name", ["segment-000000.deleted", "segment-000002.deleted"])
def test_an_interrupted_deletion_is_completed(tmp_path, name):
    store = filled(tmp_path, (3, 3, 3), segment_bytes=1)
    store.close()
    (tmp_path / name).with_suffix(".index").rename(tmp_path / name)
    left = [(n, 3) for n in range(3) if f"00000{n}" not in name]
    assert_holds(EpisodeStore(tmp_path, read_only=True), left)
    assert_holds(EpisodeStore(tmp_path), left)
    assert len(list(tmp_path.glob("segment-*"))) == 4


def test_a_store_without_its_description_is_not_overwritten(tmp_path):
    filled(tmp_path).close()
    meta = tmp_path / "meta.json"
    meta.write_bytes(meta.read_bytes()[:40])
    with pytest.raises(UserError, match="meta.json' cannot be read .*copy it again"):
        EpisodeStore(tmp_path)
    meta.unlink()
    (tmp_path / "segment-000000.index").unlink()
    before = contents(tmp_path)
    with pytest.raises(UserError, match="has episodes but no meta.json"):
        EpisodeStore(tmp_path)
    assert contents(tmp_path) == before


WRITER = """
import sys
from doubles_episodes import numbered_episode
from sparring.data.episodes import EpisodeStore
store = EpisodeStore(sys.argv[1], segment_bytes=200_000, max_bytes=int(sys.argv[2]) or None)
print("ready", flush=True)
while True:
    number = store.next_number
    store.append(numbered_episode(number, 1 + number * 37 % 90))
"""


def start_writer(folder, max_bytes=0) -> subprocess.Popen:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(max_bytes)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout.readline() == "ready\n"
    return writer


@pytest.mark.usefixtures("forked")
def test_a_killed_writer_leaves_complete_episodes_and_an_unlocked_folder(tmp_path):
    reader, expected = None, 0
    for more in (1, 120):
        writer = start_writer(tmp_path)
        try:
            with pytest.raises(UserError, match="already open for writing"):
                EpisodeStore(tmp_path)
            reader = reader or EpisodeStore(tmp_path, read_only=True)
            while len(reader) < expected + more:
                reader.refresh()
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
        store = EpisodeStore(tmp_path)
        assert len(store) >= expected + more
        expected = len(store)
        assert_holds(store, [(n, 1 + n * 37 % 90) for n in range(expected)])
        store.close()


@pytest.mark.usefixtures("forked")
def test_reading_while_another_process_writes_and_deletes(tmp_path):
    writer = start_writer(tmp_path, max_bytes=1_600_000)
    try:
        reader = EpisodeStore(tmp_path, read_only=True)
        checked = set()
        while not len(checked) or max(checked) < 400:
            reader.refresh()
            for i in range(0, len(reader), 7):
                number = int(reader.numbers[i])
                assert_equal(reader.episode(i), numbered_episode(number, 1 + number * 37 % 90))
                checked.add(number)
        # the reader's view stays complete although all of it has been deleted since
        numbers = reader.numbers.copy()
        newer = EpisodeStore(tmp_path, read_only=True)
        while newer.numbers[0] <= numbers[-1]:
            newer.refresh()
        assert_holds(reader, [(n, 1 + n * 37 % 90) for n in numbers.tolist()])
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert numbers[0] > 0 and reader.bytes() <= 1_600_000


def test_observations_are_stored_once_and_read_without_a_copy(tmp_path):
    store = filled(tmp_path, (100,))
    image = 3 * 4 * 4
    (column,) = [c for c in store.layout.columns if c.name == "observation/image/head"]
    assert (column.dtype, column.shape, column.row_bytes) == ("uint8", (3, 4, 4), image)
    assert store.bytes() < 101 * image + 100 * 120 + 2000
    episode = store.episode(0)
    now, following = episode["observation", "image", "head"], episode["next", "observation", "image", "head"]
    assert following.data_ptr() == now.data_ptr() + image
    assert np.shares_memory(now.numpy(), store.locate(0)[0].bytes)
    # a write stays in this process
    now[:] = 0
    store.close()
    assert_holds(EpisodeStore(tmp_path, read_only=True), [(0, 100)])


def test_the_info_of_an_episode_is_stored(tmp_path):
    store = filled(tmp_path)
    store.append(numbered_episode(3, 2), task="push the cube\nslowly: é", success=True)
    store.close()
    again = EpisodeStore(tmp_path, read_only=True)
    assert again.info(1) == {"source": "random", "seed": 1}
    assert again.info(-1) == {"task": "push the cube\nslowly: é", "success": True}


def test_the_capacity_is_logged_at_the_first_episode(tmp_path, logged):
    store = EpisodeStore(tmp_path, max_bytes=1_000_000)
    store.append(numbered_episode(0, 5))
    store.append(numbered_episode(1, 5))
    # bytes per step: image 48, state 8, action 24, reward 8, memory 20, version 8, is_first, terminated, success
    message = f"episodes in {tmp_path}: 119 bytes per step, at most 1.0 MB, about 8,403 steps"
    assert [r.getMessage() for r in logged.records] == [message]


def test_mistakes_are_explained(tmp_path):
    store = filled(tmp_path / "a")
    with pytest.raises(UserError, match="memory/world_model is missing, was float32 \\[5\\]; give another folder"):
        store.append(numbered_episode(3, 4, memory=False))
    with pytest.raises(UserError, match="row t\\+1 differs from row t of next/observation/"):
        store.append(torch.cat([numbered_episode(3, 4), numbered_episode(4, 4)]))
    with pytest.raises(UserError, match="at least one step"):
        store.append(numbered_episode(3, 4)[:0])
    with pytest.raises(UserError, match="no 'next/observation/image/head'; add it"):
        store.append(numbered_episode(3, 4).exclude(("next", "observation")))
    with pytest.raises(UserError, match="version is bfloat16"):
        store.append(numbered_episode(3, 4).set("version", torch.zeros(4, dtype=torch.bfloat16)))
    with pytest.raises(UserError, match="of one robot, got \\[4, 2\\]; append the episodes of each robot separately"):
        store.append(torch.stack([numbered_episode(3, 4)] * 2, 1))
    with pytest.raises(UserError, match="expected a TensorDict \\[T\\], got dict"):
        store.append({"action": torch.zeros(3)})
    with pytest.raises(IndexError, match="episode 99 of 3 in "):
        store.episode(99)
    broken = numbered_episode(3, 4).clone()
    broken["observation", "state"][2] = broken["next", "observation", "state"][1] = float("nan")
    with pytest.raises(UserError, match="observation/state contains NaN"):
        store.append(broken)
    assert_holds(store, [(0, 3), (1, 1), (2, 5)])
    with pytest.raises(UserError, match="is read-only or closed"):
        EpisodeStore(tmp_path / "a", read_only=True).append(numbered_episode(3, 4))
    with pytest.raises(UserError, match="does not exist"):
        EpisodeStore(tmp_path / "b", read_only=True)
    store.close()
    next((tmp_path / "a").glob("*.data")).unlink()
    with pytest.raises(UserError, match="is missing; copy the folder again"):
        EpisodeStore(tmp_path / "a", read_only=True)


def test_a_full_disk_leaves_the_store_as_it_was(tmp_path, monkeypatch):
    store = filled(tmp_path)
    pwrite, calls = os.pwrite, []

    def full_after_four(*arguments):
        calls.append(arguments)
        if len(calls) > 4:
            raise OSError(28, "No space left on device")
        return pwrite(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full_after_four)
        with pytest.raises(OSError, match="No space left"):
            store.append(numbered_episode(3, 50))
    assert_holds(store, [(0, 3), (1, 1), (2, 5)])
    assert sum(f.stat().st_size for f in tmp_path.glob("segment-*")) == store.bytes()
    store.append(numbered_episode(3, 2))
    store.close()
    assert_holds(EpisodeStore(tmp_path, read_only=True), [(0, 3), (1, 1), (2, 5), (3, 2)])


def test_a_first_episode_that_fails_does_not_fix_the_columns(tmp_path, monkeypatch):
    store = EpisodeStore(tmp_path)
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.append(numbered_episode(0, 5), seed=np.int64(3))
    assert not (tmp_path / "meta.json").exists()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        store.append(numbered_episode(0, 5))
    reader = EpisodeStore(tmp_path, read_only=True)
    store.append(numbered_episode(0, 5, memory=False))
    reader.refresh()
    assert_equal(reader.episode(0), numbered_episode(0, 5, memory=False))


@pytest.fixture
def flushed(monkeypatch):
    """Names of the files and folders that were flushed to the disk."""
    names, fsync = [], os.fsync

    def recording(handle):
        names.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recording)
    return names


def test_the_next_writer_flushes_what_a_killed_one_did_not(tmp_path, flushed):
    folder = tmp_path / "store"
    killed = filled(folder)
    # a killed process releases its lock
    os.close(killed._lock)
    flushed.clear()
    store = EpisodeStore(folder)
    assert store.state_dict() == {"next_number": 3, "first_number": 0}
    assert flushed == ["segment-000000.data", "segment-000000.index", "store"]


def test_a_new_segment_and_its_folder_are_flushed(tmp_path, flushed):
    store = filled(tmp_path / "store", segment_bytes=1)
    flushed.clear()
    store.append(numbered_episode(3, 4))
    assert flushed == ["segment-000002.data", "segment-000002.index", "store"]


def test_a_checkpoint_without_any_remaining_episode_is_logged(tmp_path, logged):
    store = filled(tmp_path, [10] * 5, max_bytes=40_000)
    state = store.state_dict()
    for number in range(5, 60):
        store.append(numbered_episode(number, 10))
    store.load_state_dict(state)
    assert len(store) == 0 and store.next_number == 5
    (message,) = [record.getMessage() for record in logged.records if record.levelname == "WARNING"]
    assert "all 5 episodes of the checkpoint were deleted" in message


def test_lists_of_episodes_are_built_under_the_lock(tmp_path):
    store = filled(tmp_path)
    windows, generator = ShuffledWindows(store, 4), torch.Generator()
    with ThreadPoolExecutor(3) as pool:
        with store.lock:
            store._arrays_changed()
            numbers, ends = (pool.submit(look) for look in (lambda: store.numbers, lambda: store.ends))
            batch = pool.submit(windows.sample, 2, generator)
            assert wait([numbers, ends, batch], timeout=0.1).done == set()
        assert [numbers.result().tolist(), ends.result().tolist()] == [[0, 1, 2], [3, 4, 9]]
        assert len(batch.result()) == 2


def test_a_checkpoint_rewinds_the_store(tmp_path):
    store = filled(tmp_path)
    state = store.state_dict()
    store.append(numbered_episode(7, 2))
    store.close()
    again = EpisodeStore(tmp_path)
    again.load_state_dict(state)
    assert_holds(again, [(0, 3), (1, 1), (2, 5)])
    with pytest.raises(UserError, match="has episodes up to number 2, but the run resumes at number 4"):
        again.load_state_dict({"next_number": 4})


def record(folder, decisions, interrupt_at=None):
    """Envs of 3 and 5 steps; optionally interrupted and resumed from saved states."""
    store = EpisodeStore(folder)
    seeds = EpisodeSeeds(0, "train", 0, 2)
    collector = Collector(counting_env((3, 5)), LinearPolicy(), seed=0)
    recorder = EpisodeRecorder(store, 2, source="explorer_3", tasks=("count",), seeds=seeds)
    for decision in range(decisions):
        if decision == interrupt_at:
            states = collector.state_dict(), recorder.state_dict(), store.state_dict()
            for _ in range(4):
                recorder.add(collector.decide())
            store.close()
            store = EpisodeStore(folder)
            collector = Collector(counting_env((3, 5)), LinearPolicy(), seed=0)
            collector.start()
            recorder = EpisodeRecorder(store, 2, source="explorer_3", tasks=("count",), seeds=seeds)
            for part, state in zip((collector, recorder, store), states, strict=True):
                part.load_state_dict(state)
        recorder.add(collector.decide())
    return store


def test_the_recorder_assembles_the_episodes_of_each_env(tmp_path):
    store = record(tmp_path, 11)
    # env 0 ends after decisions 3, 6, 9; env 1 after 5 and 10
    assert [int(store.episode(i)["observation", "state"][0, 0]) for i in range(5)] == [0, 1, 0, 0, 1]
    seeds = EpisodeSeeds(0, "train", 0, 2)
    for i, (env, number) in enumerate([(0, 0), (1, 0), (0, 1), (0, 2), (1, 1)]):
        steps = (3, 5)[env]
        episode = store.episode(i)
        # (env, episode, step), and the true last observation rather than the first of the next episode
        state = torch.tensor([[env, number, t] for t in range(steps + 1)]).float()
        assert torch.equal(episode["observation", "state"], state[:-1])
        assert torch.equal(episode["next", "observation", "state"], state[1:])
        assert episode["next", "reward"][:, 0].tolist() == [100 * env + t for t in range(1, steps + 1)]
        assert episode["is_first"].tolist() == [True] + [False] * (steps - 1)
        assert episode["next", "terminated"][-1] == (env == 0) and episode["next", "truncated"][-1] == (env == 1)
        assert episode.get("noise", None) is None and episode.get("trace", None) is None
        info = {"source": "explorer_3", "success": env == 0, "task": "count", "seed": seeds(env, number)}
        assert store.info(i) == info


def test_a_resumed_recorder_stores_bit_identical_episodes(tmp_path):
    uninterrupted, stopped = record(tmp_path / "a", 20), record(tmp_path / "b", 20, interrupt_at=7)
    assert len(uninterrupted) == len(stopped) == 10
    for i in range(10):
        assert_equal(stopped.episode(i), uninterrupted.episode(i))
        assert stopped.info(i) == uninterrupted.info(i)


def test_an_episode_without_its_start_is_not_stored(tmp_path):
    store = EpisodeStore(tmp_path)
    collector = Collector(counting_env((3, 5)), LinearPolicy(), seed=0)
    collector.decide()
    recorder = EpisodeRecorder(store, 2)
    for _ in range(9):
        recorder.add(collector.decide())
    firsts = [store.episode(i)["observation", "state"][0].tolist() for i in range(len(store))]
    assert firsts == [[0, 1, 0], [0, 2, 0], [1, 1, 0]]
    # only steps of open episodes are held
    assert len(recorder.state_dict()["steps"]) == 1
