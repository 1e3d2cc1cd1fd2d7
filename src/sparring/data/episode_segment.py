"""A segment of the episode store: a data file of complete episodes and its index, written and mapped into memory.

A crash can damage only the end, which is then truncated and logged: an episode gets its line in the index after all its
data were written, and a segment is flushed to the disk before the next one begins. Other damage raises an error;
`repair` moves it into a folder. Checksums of the last segment with episodes are verified when it is opened, because all
others were flushed. Every other episode is verified before it is first read.
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
    """A data file and its index. `records`: its complete episodes; `bytes`: their data, mapped into memory."""

    def __init__(self, folder: Path, number: int):
        stem = folder / f"segment-{number:06d}"
        self.number = number
        self.data_path, self.index_path = stem.with_suffix(".data"), stem.with_suffix(".index")
        self.deleted_path = stem.with_suffix(".deleted")
        self.records: list[EpisodeRecord] = []
        self.bytes = np.empty(0, np.uint8)
        self._pages: mmap.mmap | None = None
        self._line_ends: list[int] = []
        # offsets of episodes whose checksums were verified
        self._verified: set[int] = set()
        self._files: tuple[int, int] | None = None

    @staticmethod
    def numbers(folder: Path, suffix: str) -> list[int]:
        """Numbers of the segments in a folder that have a file with this suffix, ascending."""
        named = re.compile(rf"segment-(\d{{6,}}){re.escape(suffix)}")
        return sorted(int(found[1]) for path in folder.iterdir() if (found := named.fullmatch(path.name)))

    @staticmethod
    def refuse_special_files(folder: Path) -> None:
        """Raise before anything is opened: a pipe would block, and writing to a link would change another file."""
        for file in sorted(folder.iterdir()):
            if file.name in (META, LOCK) or file.name.startswith("segment-"):
                # the writer may delete it at the same time
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
        """Add the episodes that were written since; FileNotFoundError if the writer has deleted the segment."""
        lines, size = self._unread_lines(), self.data_path.stat().st_size
        for line in lines:
            record = EpisodeRecord.parse(line)
            if record is None or record.end > size or not record.follows(self.records[-1] if self.records else None):
                break
            self._add_record(record, line)
        self._map()

    def prefetch(self, start: int, size: int) -> None:
        """Start reading these bytes ahead: a disk serves many requests together far faster than one by one."""
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        if size:
            self._pages.madvise(mmap.MADV_WILLNEED, page, start + size - page)

    def verify(self, record: EpisodeRecord) -> None:
        """Raise if the checksum of an episode does not match; each episode is verified once."""
        if record.offset in self._verified:
            return
        if zlib.crc32(self.bytes[record.offset : record.end].data) != record.crc:
            raise _damage(self.data_path, f"the data of episode {record.number} is damaged")
        self._verified.add(record.offset)

    def append(self, record: EpisodeRecord, pieces: list) -> None:
        """Write the data first, then the line that makes it valid."""
        data, index = self._files = self._files or self._open()
        line, position = record.line(), record.offset
        try:
            for piece in pieces:
                position = _write(data, piece, position)
            _write(index, line, self.index_end)
        except OSError:
            # e.g. a full disk: remove what was written, so that it does not precede the next episode
            self.cut(len(self.records))
            raise
        self._add_record(record, line)
        self._verified.add(record.offset)
        self._map()

    def intact(self, records: list[EpisodeRecord]) -> list[EpisodeRecord]:
        """Those of `records` whose data match their checksums."""
        if not records:
            return []
        # read instead of mapped: otherwise all of it would stay in the memory of this process
        with open(self.data_path, "rb") as file:
            return [r for r in records if file.seek(r.offset) == r.offset and zlib.crc32(file.read(r.size)) == r.crc]

    def unread(self) -> list[EpisodeRecord | None]:
        """Lines of the index after `records`: damaged (None), without their data, or new."""
        return [EpisodeRecord.parse(line) for line in self._unread_lines()] if self.index_path.exists() else []

    def torn(self, layout: EpisodeLayout) -> tuple[int, int, int]:
        """(episodes, steps, bytes) after the last complete episode, lost in a crash; lower bounds."""
        size, unread = max(self.data_path.stat().st_size - self.data_end, 0), self.unread()
        lost = {record.offset: record.steps for record in unread if record} | self.unlisted(self.data_end, layout)
        # without a complete header the number of steps is unknown
        return max(len(lost), int(bool(size or unread))), sum(lost.values()), size

    def unlisted(self, position: int, layout: EpisodeLayout) -> dict[int, int]:
        """Offset -> steps of the consecutive episodes in the data from `position` on."""
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

    def refresh_if_present(self) -> bool:
        """Refresh; returns False if the writer has deleted the segment."""
        try:
            self.refresh()
        except FileNotFoundError:
            # a writer deletes the index first
            if self.index_path.exists():
                advice = "copy the folder again, or open it with EpisodeStore(folder, repair=True)"
                raise UserError(f"'{self.data_path}' is missing; {advice}") from None
            return False
        return True

    def lacks_index(self) -> bool:
        """Checked in this order: a writer may be creating it (index first) or deleting it (index renamed first)."""
        size = self.data_path.stat().st_size if self.data_path.exists() else 0
        missing = not self.index_path.exists() and not self.deleted_path.exists()
        return size > 0 and missing and self.data_path.exists()

    def forget(self, count: int) -> None:
        """Drop all but the first `count` episodes from memory; the files do not change."""
        del self.records[count:], self._line_ends[count:]
        self._verified.intersection_update(record.offset for record in self.records)

    def cut(self, count: int) -> None:
        """Keep the first `count` episodes and truncate the files; no process may be reading the others."""
        self.forget(count)
        if not self.records:
            self.delete()
            return
        os.truncate(self.index_path, self.index_end)
        os.truncate(self.data_path, self.data_end)
        self._map()

    def flush(self) -> None:
        """Flush to the disk, the index last."""
        for file in self._files or ():
            os.fsync(file)

    def close(self) -> None:
        """Flush, and close the files that were opened for writing."""
        self.flush()
        for file in self._files or ():
            os.close(file)
        self._files = None

    def delete(self) -> None:
        """Rename the index first, as a mark that the data must be deleted. Maps of other processes stay valid."""
        self.close()
        if self.index_path.exists():
            self.index_path.rename(self.deleted_path)
        self.data_path.unlink(missing_ok=True)
        self.deleted_path.unlink(missing_ok=True)

    def _open(self) -> tuple[int, int]:
        flags = os.O_RDWR | (0 if self.records else os.O_CREAT | os.O_TRUNC)
        files = os.open(self.data_path, flags, 0o644), os.open(self.index_path, flags, 0o644)
        if not self.records:
            # the folder, too: flushing a file does not flush its name
            flush(self.data_path.parent)
        return files

    def _unread_lines(self) -> list[bytes]:
        with open(self.index_path, "rb") as file:
            file.seek(self.index_end)
            return file.read().splitlines(keepends=True)

    def _add_record(self, record: EpisodeRecord, line: bytes) -> None:
        self._line_ends.append(self.index_end + len(line))
        self.records.append(record)

    def _map(self) -> None:
        if len(self.bytes) == self.data_end:
            return
        with open(self.data_path, "rb") as file:
            # copy-on-write, since torch accepts no read-only memory: writes stay in this process
            self._pages = mmap.mmap(file.fileno(), self.data_end, access=mmap.ACCESS_COPY)
        self.bytes = np.frombuffer(self._pages, np.uint8)


def _write(file: int, piece, position: int) -> int:
    """Write all of it at `position`; returns the end."""
    view = memoryview(piece)
    while len(view):
        written = os.pwrite(file, view, position)
        view, position = view[written:], position + written
    return position


log = logging.getLogger(__name__)

# the folder for files that a repair moves aside
_DAMAGED = "damaged"


def open_segments(folder: Path, read_only: bool, repair: bool) -> list[Segment]:
    # in this order, because a writer saves the layout before the first segment
    present = Segment.numbers(folder, ".data")
    layout = EpisodeLayout.load(folder)
    if present and layout is None:
        raise UserError(f"'{folder}' has episodes but no {META}; copy the folder again")
    if layout is None:
        return []
    segments = _inspect(folder, layout) if read_only else _recover(folder, layout, repair)
    _check_order(folder, segments)
    return segments


def _check_order(folder: Path, segments: list[Segment]) -> None:
    """Check that episodes are numbered in order, with gaps only if a repair moved some aside."""
    last = None
    for segment in (segment for segment in segments if segment.records):
        first = segment.records[0].number
        if last is not None and first <= last:
            why = f"begins with episode {first}, but the previous segment ends with {last}"
            raise UserError(f"'{segment.index_path}' {why}: files were renamed; copy the folder again")
        if last is not None and first > last + 1 and not (folder / _DAMAGED).exists():
            log.warning("%s: episodes %d to %d are missing; copy the folder again", folder, last + 1, first - 1)
        last = segment.records[-1].number


def _recover(folder: Path, layout: EpisodeLayout, repair: bool) -> list[Segment]:
    """For the writer: truncate the segments after the last complete episode, and finish interrupted deletions."""
    for number in Segment.numbers(folder, ".deleted"):
        Segment(folder, number).delete()
    if repair:
        _salvage(folder, layout)
    segments, episodes, steps, size = _segments(folder), 0, 0, 0
    for segment, complete in _with_complete_counts(layout, segments):
        segment.forget(complete)
        lost = segment.torn(layout)
        episodes, steps, size = episodes + lost[0], steps + lost[1], size + lost[2]
        segment.cut(complete)
        # the process that wrote it may have been killed before it flushed
        if segment.records:
            flush(segment.data_path)
            flush(segment.index_path)
    flush(folder)
    if episodes:
        what = "an incomplete last episode" if episodes == 1 else f"the {episodes} incomplete last episodes"
        log.warning("%s: dropped %s: %d steps lost, %d bytes of them written", folder, what, steps, size)
    # segments from a crash before their first episode
    for number in set(Segment.numbers(folder, ".data")) - set(Segment.numbers(folder, ".index")):
        Segment(folder, number).delete()
    return [segment for segment in segments if segment.records]


def _inspect(folder: Path, layout: EpisodeLayout) -> list[Segment]:
    """For a reader, which changes nothing: data without an index line may be incomplete or still being written."""
    segments, steps, size = _segments(folder), 0, 0
    for segment, complete in _with_complete_counts(layout, segments, writing=False):
        if complete < len(segment.records):
            raise UserError(
                f"'{segment.data_path}': the data of episode {segment.records[complete].number} is damaged, and no "
                "complete one follows; open the folder once without read_only to drop the damaged end"
            )
        _, torn_steps, torn_bytes = segment.torn(layout)
        steps, size = steps + torn_steps, size + torn_bytes
        if None in segment.unread():
            log.warning("%s: the last line is damaged; its episode is ignored", segment.index_path)
    if size:
        level = logging.INFO if is_held(folder) else logging.WARNING
        log.log(level, "%s: ignored %d steps of an episode that is incomplete or still being written", folder, steps)
    return segments


def _segments(folder: Path) -> list[Segment]:
    """All segments, including empty ones; a writer may delete the oldest at the same time."""
    segments = [Segment(folder, number) for number in Segment.numbers(folder, ".index")]
    for number in Segment.numbers(folder, ".data"):
        if (lost := Segment(folder, number)).lacks_index():
            raise _damage(lost.index_path, "is missing, but its data file exists")
    return [segment for segment in segments if segment.refresh_if_present()]


def _with_complete_counts(layout: EpisodeLayout, segments: list[Segment], writing: bool = True):
    """Yield (segment, number of its complete episodes) of those that a crash may have cut; raise for other damage."""
    last = max((s.number for s in segments if s.records), default=-1)
    for segment in segments:
        try:
            _refuse_bad_index(layout, segment, segment is not segments[-1], writing)
        except FileNotFoundError:
            # the writer has just deleted it
            continue
        if segment.number >= last:
            yield segment, _count_complete(segment)


def _refuse_bad_index(layout: EpisodeLayout, segment: Segment, finished: bool, writing: bool) -> None:
    """Raise for damage that no crash causes. A crash can leave, at the end of the last segment, one episode without a
    line, or lines without data."""
    complete, unread = len(segment.records), segment.unread()
    if None in (unread if finished else unread[:-1]):
        at = unread.index(None)
        following = [record for record in unread[at:] if record]
        raise _damage(segment.index_path, f"line {complete + at + 1} is damaged, and {_counted(following)} follow it")
    last = segment.records[-1] if segment.records else None
    for line, record in enumerate(unread, complete + 1):
        if record and not record.follows(last):
            raise _damage(segment.index_path, f"line {line} does not continue the previous one: lines missing or moved")
        last = record or last
    if finished and unread:
        raise _damage(segment.data_path, f"only {complete} of its {complete + len(unread)} episodes are complete")
    unlisted = segment.unlisted(segment.data_end, layout)
    # a reader may see more than one while another process writes
    if unlisted and (finished or len(unlisted) > 1 and writing):
        more = f"the data file contains {len(unlisted)} more"
        raise _damage(segment.index_path, f"lists {complete} episodes, but {more}")


def _count_complete(segment: Segment) -> int:
    """The number of episodes before the first damaged one; raises if an intact one follows it."""
    records = segment.records
    intact = {record.offset for record in segment.intact(records)}
    segment._verified |= intact
    bad = [i for i, record in enumerate(records) if record.offset not in intact]
    if not bad:
        return len(records)
    following = [record for i, record in enumerate(records) if i > bad[0] and i not in bad]
    if following or len(bad) == len(records) > 1:
        rest = f"{_counted(following)} follow it" if following else f"so are all {len(records)} of the segment"
        raise _damage(segment.data_path, f"the data of episode {records[bad[0]].number} is damaged, and {rest}")
    return bad[0]


def _counted(records: list) -> str:
    return f"{len(records)} complete episodes ({sum(record.steps for record in records):,} steps)"


def _damage(file: Path, problem: str) -> UserError:
    return UserError(
        f"'{file}': {problem}. A crash does not cause this, so nothing was changed. Copy the folder again, or open it "
        f"with EpisodeStore(folder, repair=True), which keeps all complete episodes and moves the rest into "
        f"'{file.parent / _DAMAGED}'"
    )


def _salvage(folder: Path, layout: EpisodeLayout) -> None:
    """Keep the complete episodes, after verifying every checksum, and move the rest aside."""
    kept: list[EpisodeRecord] = []
    lost = 0
    for number in sorted({*Segment.numbers(folder, ".data"), *Segment.numbers(folder, ".index")}):
        complete, damaged = _salvage_segment(folder, Segment(folder, number), layout)
        kept, lost = kept + complete, lost + damaged
    if lost:
        rest = f"moved the rest of {lost} damaged ones to {folder / _DAMAGED}"
        log.warning("%s: kept %s; %s", folder, _counted(kept), rest)


def _salvage_segment(folder: Path, segment: Segment, layout: EpisodeLayout) -> tuple[list[EpisodeRecord], int]:
    """Returns the complete episodes, and the number of others as far as known."""
    if not segment.index_path.exists() or not segment.data_path.exists():
        lost = segment.torn(layout)[0] if segment.data_path.exists() else len(segment.unread())
        _put_aside(segment)
        return [], lost
    segment.refresh()
    size = segment.data_path.stat().st_size
    lines = [*segment.records, *segment.unread()]
    # without duplicates, in the order of the data
    listed = sorted({record.offset: record for record in lines if record is not None}.values(), key=lambda r: r.offset)
    begun = {*segment.unlisted(0, layout), *segment.unlisted(listed[-1].end if listed else 0, layout)}
    # without those that an earlier repair dropped
    begun = {at for at in begun if not any(record.offset - record.gap <= at < record.offset for record in listed)}
    complete = _linked(segment.intact([record for record in listed if record.end <= size]))
    # a damaged line and its data are one episode
    lost = max(len(listed) + lines.count(None), len(begun | {record.offset for record in listed})) - len(complete)
    if not lost and complete == lines:
        return complete, 0
    if not complete:
        _put_aside(segment)
        return [], lost
    shutil.copy2(segment.index_path, _free_name(folder, segment.index_path.name))
    partial = segment.index_path.with_suffix(".partial")
    partial.write_bytes(b"".join(record.line() for record in complete))
    flush(partial)
    partial.replace(segment.index_path)
    with open(segment.data_path, "rb") as file:
        file.seek(complete[-1].end)
        tail = file.read()
    if tail:
        aside = _free_name(folder, f"{segment.data_path.name}.from-{complete[-1].end}")
        aside.write_bytes(tail)
        flush(aside)
        os.truncate(segment.data_path, complete[-1].end)
    return complete, lost


def _linked(records: list[EpisodeRecord]) -> list[EpisodeRecord]:
    """The records that are in order, each with the size of the gap that damaged ones left before it."""
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
    """A path in the folder of damaged files that does not exist yet, so that no earlier repair is overwritten."""
    (folder / _DAMAGED).mkdir(exist_ok=True)
    names = (folder / _DAMAGED / (name if k == 0 else f"{name}.{k}") for k in count())
    return next(path for path in names if not path.exists())
