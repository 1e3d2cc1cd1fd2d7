"""Keeps what is whole of a damaged store; all else is put into a folder beside it, and nothing is deleted.

Damaged bytes between whole episodes stay where they are: the new index has no line for them.
"""

import logging
import os
import shutil
from itertools import count
from pathlib import Path

from sparring.data.episode_files import Layout, Record
from sparring.data.episode_segment import Segment, segment_numbers
from sparring.disk import flush

log = logging.getLogger(__name__)

DAMAGED = "damaged"


def salvage(folder: Path, layout: Layout) -> None:
    """Every checksum is looked at, also those of old segments."""
    kept: list[Record] = []
    lost = 0
    for number in sorted({*segment_numbers(folder, ".data"), *segment_numbers(folder, ".index")}):
        whole, damaged = _salvage_segment(folder, Segment(folder, number), layout)
        kept += whole
        lost += damaged
    if lost:
        steps = sum(record.steps for record in kept)
        log.warning(
            "%s: kept %d whole episodes (%s steps); what is left of %d damaged ones is in %s",
            *(folder, len(kept), f"{steps:,}", lost, folder / DAMAGED),
        )


def _salvage_segment(folder: Path, segment: Segment, layout: Layout) -> tuple[list[Record], int]:
    """The whole episodes, and how many others there were as far as can be told."""
    if not segment.index_path.exists() or not segment.data_path.exists():
        lost = segment.torn(layout)[0] if segment.data_path.exists() else len(segment.unread())
        _put_aside(folder, segment.index_path, segment.data_path)
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
        _put_aside(folder, segment.index_path, segment.data_path)
        return [], lost
    shutil.copy2(segment.index_path, _free_name(folder, segment.index_path.name))
    partial = segment.index_path.with_suffix(".partial")
    partial.write_bytes(b"".join(record.line() for record in whole))
    flush(partial)
    partial.replace(segment.index_path)
    _put_tail_aside(folder, segment.data_path, whole[-1].end)
    return whole, lost


def _put_aside(folder: Path, *files: Path) -> None:
    for file in files:
        if file.exists():
            file.rename(_free_name(folder, file.name))


def _put_tail_aside(folder: Path, data: Path, end: int) -> None:
    with open(data, "rb") as file:
        file.seek(end)
        tail = file.read()
    if tail:
        aside = _free_name(folder, f"{data.name}.from-{end}")
        aside.write_bytes(tail)
        flush(aside)
        os.truncate(data, end)


def _free_name(folder: Path, name: str) -> Path:
    """Of an earlier repair nothing is overwritten."""
    (folder / DAMAGED).mkdir(exist_ok=True)
    names = (folder / DAMAGED / (name if k == 0 else f"{name}.{k}") for k in count())
    return next(path for path in names if not path.exists())
