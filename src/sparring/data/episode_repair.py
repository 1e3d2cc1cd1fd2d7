"""Opens the segments of an episode store: a torn end is cut off and logged, other damage is refused or repaired.

Only the end can be torn by a crash: an episode has a line in the index once all its data are written, and a segment is
flushed to the disk before the next one is begun. Whatever else does not fit together is damage. Then nothing is
changed, unless `repair` is asked for: whole episodes are kept, the rest is moved into a folder, nothing is deleted.
Only the checksums of the last segment with episodes are verified: all others were flushed, and are long to read.
"""

import logging
import os
import shutil
from itertools import count
from pathlib import Path

from sparring.data.episode_files import META, EpisodeLayout, EpisodeRecord
from sparring.data.episode_segment import Segment
from sparring.errors import UserError
from sparring.processes.files import flush

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
    return _inspect(folder, layout) if read_only else _mend(folder, layout, repair)


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
    if size:
        log.info("%s: not read: %d steps of an episode that is torn or still being written", folder, steps)
    return segments


def _segments(folder: Path) -> list[Segment]:
    """All of them, also those without an episode; a writer may be deleting the oldest meanwhile."""
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
    """The whole episodes, and how many others there were as far as can be told."""
    if not segment.index_path.exists() or not segment.data_path.exists():
        lost = segment.torn(layout)[0] if segment.data_path.exists() else len(segment.unread())
        _put_aside(segment)
        return [], lost
    segment.refresh()
    size = segment.data_path.stat().st_size
    lines = [*segment.records, *segment.unread()]
    listed = [record for record in lines if record is not None]
    unlisted = segment.unlisted(listed[-1].end if listed else 0, layout)
    whole = segment.intact([record for record in listed if record.end <= size])
    # a damaged last line and its data are one episode
    lost = max(len(lines), len(listed) + len(unlisted)) - len(whole)
    if not lost:
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


def _put_aside(segment: Segment) -> None:
    for file in (segment.index_path, segment.data_path):
        if file.exists():
            file.rename(_free_name(file.parent, file.name))


def _free_name(folder: Path, name: str) -> Path:
    """Of an earlier repair nothing is overwritten."""
    (folder / _DAMAGED).mkdir(exist_ok=True)
    names = (folder / _DAMAGED / (name if k == 0 else f"{name}.{k}") for k in count())
    return next(path for path in names if not path.exists())
