"""A segment of the episode store: a data file of whole episodes and its index, written and mapped into memory.

A crash can tear only the end, which is cut off and logged: an episode has a line in the index once all its data are
written, and a segment is flushed to the disk before the next one is begun. Other damage is refused, or by `repair` put
aside in a folder. Checksums are verified of the last segment with episodes when it is opened, since all others were
flushed, and of every other episode before it is first read.
"""

import logging
import mmap
import os
import re
import shutil
import stat
import zlib
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np

from sparring.data.episode_files import HEADER_BYTES, META, EpisodeLayout, EpisodeRecord
from sparring.errors import UserError
from sparring.processes.files import LOCK, flush, is_held


class Segment:
    """A data file and its index. `records` are its whole episodes, `bytes` their data, mapped into memory."""

    def __init__(self, folder: Path, number: int):
        stem = folder / f"segment-{number:06d}"
        self.number = number
        self.data_path, self.index_path = stem.with_suffix(".data"), stem.with_suffix(".index")
        self.deleted_path = stem.with_suffix(".deleted")
        self.records: list[EpisodeRecord] = []
        self.bytes = np.empty(0, np.uint8)
        self._pages: mmap.mmap | None = None
        self._line_ends: list[int] = []
        # where episodes begin whose data are known to be what was written
        self._verified: set[int] = set()
        self._files: tuple[int, int] | None = None

    @staticmethod
    def numbers(folder: Path, suffix: str) -> list[int]:
        """Of the segments in a folder that have such a file, ascending."""
        named = re.compile(rf"segment-(\d{{6,}}){re.escape(suffix)}")
        return sorted(int(found[1]) for path in folder.iterdir() if (found := named.fullmatch(path.name)))

    @staticmethod
    def refuse_odd_files(folder: Path) -> None:
        """Before anything is opened: a pipe would be waited for, and through a link another file written."""
        for file in sorted(folder.iterdir()):
            if file.name in (META, LOCK) or file.name.startswith("segment-"):
                # the writer may have deleted it just now
                with suppress(FileNotFoundError):
                    if not stat.S_ISREG(file.lstat().st_mode):
                        raise UserError(f"'{file}' is not a regular file; copy the folder again, without links")

    @property
    def data_end(self) -> int:
        return self.records[-1].end if self.records else 0

    @property
    def index_end(self) -> int:
        return self._line_ends[-1] if self.records else 0

    def refresh(self) -> None:
        """Take in what the writer has added since; FileNotFoundError where it has deleted the segment."""
        lines, size = self._unread_lines(), self.data_path.stat().st_size
        for line in lines:
            record = EpisodeRecord.parse(line)
            if record is None or record.end > size or not record.follows(self.records[-1] if self.records else None):
                break
            self._take(record, line)
        self._map()

    def expect(self, start: int, size: int) -> None:
        """These bytes will be read soon: a cold disk serves many requests at once far faster than one by one."""
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        if size:
            self._pages.madvise(mmap.MADV_WILLNEED, page, start + size - page)

    def verify(self, record: EpisodeRecord) -> None:
        """Refuse data that are not what was written; each episode is read for this once."""
        if record.offset in self._verified:
            return
        if zlib.crc32(self.bytes[record.offset : record.end].data) != record.crc:
            raise _damage(self.data_path, f"the data of episode {record.number} are damaged")
        self._verified.add(record.offset)

    def append(self, record: EpisodeRecord, pieces: list) -> None:
        """Data first, then the line that makes them count."""
        data, index = self._files = self._files or self._open()
        line, position = record.line(), record.offset
        try:
            for piece in pieces:
                position = _write(data, piece, position)
            _write(index, line, self.index_end)
        except OSError:
            # a full disk: what was written of it must not lie under the next episode
            self.cut(len(self.records))
            raise
        self._take(record, line)
        self._verified.add(record.offset)
        self._map()

    def intact(self, records: list[EpisodeRecord]) -> list[EpisodeRecord]:
        """Those of `records` whose data are what their checksums promise."""
        if not records:
            return []
        # read, not mapped: all of it would stay in this process's memory
        with open(self.data_path, "rb") as file:
            return [r for r in records if file.seek(r.offset) == r.offset and zlib.crc32(file.read(r.size)) == r.crc]

    def unread(self) -> list[EpisodeRecord | None]:
        """What the index lists behind `records`: not parsed (None), without its data, or written since."""
        return [EpisodeRecord.parse(line) for line in self._unread_lines()] if self.index_path.exists() else []

    def torn(self, layout: EpisodeLayout) -> tuple[int, int, int]:
        """(episodes, steps, bytes) behind the last whole one: what a crash has cut short, as far as can be told."""
        size, unread = max(self.data_path.stat().st_size - self.data_end, 0), self.unread()
        lost = {record.offset: record.steps for record in unread if record} | self.unlisted(self.data_end, layout)
        # where not even the header was written, there is nothing to tell the steps by
        return max(len(lost), int(bool(size or unread))), sum(lost.values()), size

    def unlisted(self, position: int, layout: EpisodeLayout) -> dict[int, int]:
        """Offset -> steps of the episodes that begin at `position` and one after another from there on."""
        found, size = {}, self.data_path.stat().st_size
        with open(self.data_path, "rb") as file:
            while position < size:
                file.seek(position)
                steps = layout.header_steps(file.read(HEADER_BYTES))
                if steps is None:
                    break
                found[position] = steps
                position += layout.block_bytes(steps)
        return found

    def still_there(self) -> bool:
        """Refreshed; False where the writer has deleted it just now."""
        try:
            self.refresh()
        except FileNotFoundError:
            # the index goes first
            if self.index_path.exists():
                mend = "copy the folder again, or open it with EpisodeStore(folder, repair=True)"
                raise UserError(f"'{self.data_path}' is missing; {mend}") from None
            return False
        return True

    def lost_its_index(self) -> bool:
        """In this order: a writer may be creating it, index first, or deleting it, which renames the index first."""
        size = self.data_path.stat().st_size if self.data_path.exists() else 0
        missing = not self.index_path.exists() and not self.deleted_path.exists()
        return size > 0 and missing and self.data_path.exists()

    def forget(self, count: int) -> None:
        """All but the first `count` episodes; the files stay as they are."""
        del self.records[count:], self._line_ends[count:]
        self._verified.intersection_update(record.offset for record in self.records)

    def cut(self, count: int) -> None:
        """Keep the first `count` episodes and the files no longer than they are; nobody may be reading the others."""
        self.forget(count)
        if not self.records:
            self.delete()
            return
        os.truncate(self.index_path, self.index_end)
        os.truncate(self.data_path, self.data_end)
        self._map()

    def flush(self) -> None:
        """Onto the disk; the index last."""
        for file in self._files or ():
            os.fsync(file)

    def close(self) -> None:
        """Flush, and let go of what is only needed for writing."""
        self.flush()
        for file in self._files or ():
            os.close(file)
        self._files = None

    def delete(self) -> None:
        """The index first: its new name says that the data are to go. Maps of other processes stay valid."""
        self.close()
        if self.index_path.exists():
            self.index_path.rename(self.deleted_path)
        self.data_path.unlink(missing_ok=True)
        self.deleted_path.unlink(missing_ok=True)

    def _open(self) -> tuple[int, int]:
        flags = os.O_RDWR | (0 if self.records else os.O_CREAT | os.O_TRUNC)
        files = os.open(self.data_path, flags, 0o644), os.open(self.index_path, flags, 0o644)
        if not self.records:
            # their names, which flushing the files themselves does not cover
            flush(self.data_path.parent)
        return files

    def _unread_lines(self) -> list[bytes]:
        with open(self.index_path, "rb") as file:
            file.seek(self.index_end)
            return file.read().splitlines(keepends=True)

    def _take(self, record: EpisodeRecord, line: bytes) -> None:
        self._line_ends.append(self.index_end + len(line))
        self.records.append(record)

    def _map(self) -> None:
        if len(self.bytes) == self.data_end:
            return
        with open(self.data_path, "rb") as file:
            # copy-on-write, since torch takes no read-only memory: a write stays in this process
            self._pages = mmap.mmap(file.fileno(), self.data_end, access=mmap.ACCESS_COPY)
        self.bytes = np.frombuffer(self._pages, np.uint8)


def _write(file: int, piece, position: int) -> int:
    """All of it, at `position`; returns where it ends."""
    view = memoryview(piece)
    while len(view):
        written = os.pwrite(file, view, position)
        view, position = view[written:], position + written
    return position


log = logging.getLogger(__name__)

# the folder that a repair moves damaged files into
_DAMAGED = "damaged"


def open_segments(folder: Path, read_only: bool, repair: bool) -> list[Segment]:
    # in this order, since a writer saves the layout before the first segment
    begun = Segment.numbers(folder, ".data")
    layout = EpisodeLayout.load(folder)
    if begun and layout is None:
        raise UserError(f"'{folder}' has episodes but no {META}; copy the folder again")
    if layout is None:
        return []
    segments = _inspect(folder, layout) if read_only else _mend(folder, layout, repair)
    _check_order(folder, segments)
    return segments


def _check_order(folder: Path, segments: list[Segment]) -> None:
    """Episodes are numbered without gaps, but for what a repair has put aside."""
    last = None
    for segment in (segment for segment in segments if segment.records):
        first = segment.records[0].number
        if last is not None and first <= last:
            why = f"begins with episode {first}, but the segment before it ends with {last}"
            raise UserError(f"'{segment.index_path}' {why}: files were renamed; copy the folder again")
        if last is not None and first > last + 1 and not (folder / _DAMAGED).exists():
            log.warning("%s: episodes %d to %d are missing; copy the folder again", folder, last + 1, first - 1)
        last = segment.records[-1].number


def _mend(folder: Path, layout: EpisodeLayout, repair: bool) -> list[Segment]:
    """For the writer: the segments end with the last whole episode, and deletions that a crash stopped are done."""
    for number in Segment.numbers(folder, ".deleted"):
        Segment(folder, number).delete()
    if repair:
        _salvage(folder, layout)
    segments, episodes, steps, size = _segments(folder), 0, 0, 0
    for segment, whole in _judged(layout, segments):
        segment.forget(whole)
        lost = segment.torn(layout)
        episodes, steps, size = episodes + lost[0], steps + lost[1], size + lost[2]
        segment.cut(whole)
        # the process that wrote it may have been killed before it did so
        if segment.records:
            flush(segment.data_path)
            flush(segment.index_path)
    flush(folder)
    if episodes:
        what = "a torn last episode" if episodes == 1 else f"the {episodes} torn last episodes"
        log.warning("%s: dropped %s: %d steps lost, %d bytes of them written", folder, what, steps, size)
    # a segment that a crash stopped before anything was in it
    for number in set(Segment.numbers(folder, ".data")) - set(Segment.numbers(folder, ".index")):
        Segment(folder, number).delete()
    return [segment for segment in segments if segment.records]


def _inspect(folder: Path, layout: EpisodeLayout) -> list[Segment]:
    """For a reader, who changes nothing: what has no line in the index may be torn, or still be on its way."""
    segments, steps, size = _segments(folder), 0, 0
    for segment, whole in _judged(layout, segments, writing=False):
        if whole < len(segment.records):
            raise UserError(
                f"'{segment.data_path}': the data of episode {segment.records[whole].number} are damaged, and no whole "
                "one follows; open the folder once without read_only, which drops the damaged end"
            )
        _, torn_steps, torn_bytes = segment.torn(layout)
        steps, size = steps + torn_steps, size + torn_bytes
        if None in segment.unread():
            log.warning("%s: its last line is damaged: the episode is not read", segment.index_path)
    if size:
        level = logging.INFO if is_held(folder) else logging.WARNING
        log.log(level, "%s: not read: %d steps of an episode that is torn or still being written", folder, steps)
    return segments


def _segments(folder: Path) -> list[Segment]:
    """All of them, also those without an episode; a writer may delete the oldest at the same time."""
    segments = [Segment(folder, number) for number in Segment.numbers(folder, ".index")]
    for number in Segment.numbers(folder, ".data"):
        if (lost := Segment(folder, number)).lost_its_index():
            raise _damage(lost.index_path, "is missing beside its data")
    return [segment for segment in segments if segment.still_there()]


def _judged(layout: EpisodeLayout, segments: list[Segment], writing: bool = True):
    """(segment, how many of its first episodes are whole) of those that a crash may have torn; damage is refused."""
    last = max((s.number for s in segments if s.records), default=-1)
    for segment in segments:
        try:
            _refuse_bad_index(layout, segment, segment is not segments[-1], writing)
        except FileNotFoundError:
            # the writer has deleted it just now
            continue
        if segment.number >= last:
            yield segment, _whole(segment)


def _refuse_bad_index(layout: EpisodeLayout, segment: Segment, finished: bool, writing: bool) -> None:
    """A crash can leave one episode without its line, or lines without their data, at the end of the last segment."""
    whole, unread = len(segment.records), segment.unread()
    if None in (unread if finished else unread[:-1]):
        at = unread.index(None)
        following = [record for record in unread[at:] if record]
        raise _damage(segment.index_path, f"line {whole + at + 1} is damaged, and {_counted(following)} follow it")
    last = segment.records[-1] if segment.records else None
    for line, record in enumerate(unread, whole + 1):
        if record and not record.follows(last):
            raise _damage(segment.index_path, f"line {line} does not follow the one before: some are missing or moved")
        last = record or last
    if finished and unread:
        raise _damage(segment.data_path, f"only {whole} of its {whole + len(unread)} episodes are whole")
    unlisted = segment.unlisted(segment.data_end, layout)
    # a reader may find more of them while a writer is at work
    if unlisted and (finished or len(unlisted) > 1 and writing):
        more = f"{len(unlisted)} more lie behind them in the data"
        raise _damage(segment.index_path, f"lists {whole} episodes, but {more}")


def _whole(segment: Segment) -> int:
    """How many of the first episodes have the data that their checksums promise, if no good one follows them."""
    records = segment.records
    intact = {record.offset for record in segment.intact(records)}
    segment._verified |= intact
    bad = [i for i, record in enumerate(records) if record.offset not in intact]
    if not bad:
        return len(records)
    following = [record for i, record in enumerate(records) if i > bad[0] and i not in bad]
    if following or len(bad) == len(records) > 1:
        rest = f"{_counted(following)} follow it" if following else f"so are all {len(records)} of the segment"
        raise _damage(segment.data_path, f"the data of episode {records[bad[0]].number} are damaged, and {rest}")
    return bad[0]


def _counted(records: list) -> str:
    return f"{len(records)} whole episodes ({sum(record.steps for record in records):,} steps)"


def _damage(file: Path, said: str) -> UserError:
    return UserError(
        f"'{file}': {said}. It is no torn end, so nothing was changed; copy the folder again, or open it "
        f"with EpisodeStore(folder, repair=True), which keeps all whole episodes and puts the rest into "
        f"'{file.parent / _DAMAGED}'"
    )


def _salvage(folder: Path, layout: EpisodeLayout) -> None:
    """Keep what is whole; every checksum is verified, also those of old segments."""
    kept: list[EpisodeRecord] = []
    lost = 0
    for number in sorted({*Segment.numbers(folder, ".data"), *Segment.numbers(folder, ".index")}):
        whole, damaged = _salvage_segment(folder, Segment(folder, number), layout)
        kept, lost = kept + whole, lost + damaged
    if lost:
        rest = f"what is left of {lost} damaged ones is in {folder / _DAMAGED}"
        log.warning("%s: kept %s; %s", folder, _counted(kept), rest)


def _salvage_segment(folder: Path, segment: Segment, layout: EpisodeLayout) -> tuple[list[EpisodeRecord], int]:
    """The whole episodes, and how many others there were, where that is known."""
    if not segment.index_path.exists() or not segment.data_path.exists():
        lost = segment.torn(layout)[0] if segment.data_path.exists() else len(segment.unread())
        _put_aside(segment)
        return [], lost
    segment.refresh()
    size = segment.data_path.stat().st_size
    lines = [*segment.records, *segment.unread()]
    # each once, in the order of the data
    listed = sorted({record.offset: record for record in lines if record is not None}.values(), key=lambda r: r.offset)
    begun = {*segment.unlisted(0, layout), *segment.unlisted(listed[-1].end if listed else 0, layout)}
    # without those that an earlier repair left out
    begun = {at for at in begun if not any(record.offset - record.gap <= at < record.offset for record in listed)}
    whole = _linked(segment.intact([record for record in listed if record.end <= size]))
    # a damaged line and its data are one episode
    lost = max(len(listed) + lines.count(None), len(begun | {record.offset for record in listed})) - len(whole)
    if not lost and whole == lines:
        return whole, 0
    if not whole:
        _put_aside(segment)
        return [], lost
    shutil.copy2(segment.index_path, _free_name(folder, segment.index_path.name))
    partial = segment.index_path.with_suffix(".partial")
    partial.write_bytes(b"".join(record.line() for record in whole))
    flush(partial)
    partial.replace(segment.index_path)
    with open(segment.data_path, "rb") as file:
        file.seek(whole[-1].end)
        tail = file.read()
    if tail:
        aside = _free_name(folder, f"{segment.data_path.name}.from-{whole[-1].end}")
        aside.write_bytes(tail)
        flush(aside)
        os.truncate(segment.data_path, whole[-1].end)
    return whole, lost


def _linked(records: list[EpisodeRecord]) -> list[EpisodeRecord]:
    """Those that stand in order, each with the gap before it that damaged ones leave."""
    found: list[EpisodeRecord] = []
    for record in records:
        last = found[-1] if found else None
        record = replace(record, gap=record.offset - (last.end if last else 0))
        found += [record] if record.follows(last) else []
    return found


def _put_aside(segment: Segment) -> None:
    for file in (segment.index_path, segment.data_path):
        if file.exists():
            file.rename(_free_name(file.parent, file.name))


def _free_name(folder: Path, name: str) -> Path:
    """Of an earlier repair nothing is overwritten."""
    (folder / _DAMAGED).mkdir(exist_ok=True)
    names = (folder / _DAMAGED / (name if k == 0 else f"{name}.{k}") for k in count())
    return next(path for path in names if not path.exists())
