"""A segment of the episode store: a data file of whole episodes and its index, written and mapped into memory."""

import mmap
import os
import zlib
from pathlib import Path

import numpy as np

from sparring.data.episode_files import HEADER_BYTES, EpisodeLayout, EpisodeRecord
from sparring.errors import UserError
from sparring.processes.files import flush


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
        self._files: tuple[int, int] | None = None

    @staticmethod
    def numbers(folder: Path, suffix: str) -> list[int]:
        """Of the segments in a folder that have such a file, ascending."""
        return sorted(int(path.stem.removeprefix("segment-")) for path in folder.glob(f"segment-*{suffix}"))

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
            if record is None or record.end > size:
                break
            self._take(record, line)
        self._map()

    def expect(self, start: int, size: int) -> None:
        """These bytes will be read soon: a cold disk serves many requests at once far faster than one by one."""
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        if size:
            self._pages.madvise(mmap.MADV_WILLNEED, page, start + size - page)

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
