"""What a crash left of the episodes that were being written: found when a store is opened, said, and cut off.

Only the end can be torn: an episode has a line in the index once all its data are written, and a segment is flushed to
the disk before the next one is begun.
"""

import logging
from pathlib import Path

from sparring.data.episode_files import Layout
from sparring.data.episode_segment import Segment, segment_numbers
from sparring.disk import flush
from sparring.errors import UserError

log = logging.getLogger(__name__)


def mend(folder: Path, layout: Layout, segments: list[Segment]) -> None:
    """For the writer: the files end with the last whole episode, or are deleted where there is none."""
    steps = size = 0
    for segment in _unfinished(folder, segments):
        whole = segment.undamaged()
        segment.forget(whole)
        torn_steps, torn_bytes = segment.torn(layout)
        steps, size = steps + torn_steps, size + torn_bytes
        segment.cut(whole)
        # the process that wrote it may have been killed before it did so
        if segment.records:
            flush(segment.data_path)
            flush(segment.index_path)
    flush(folder)
    if size or steps:
        log.warning("%s: dropped a torn last episode: %d steps lost, %d bytes of them written", folder, steps, size)
    # data without an index: a deletion that was interrupted
    for number in set(segment_numbers(folder, ".data")) - set(segment_numbers(folder, ".index")):
        Segment(folder, number).delete()


def inspect(folder: Path, layout: Layout, segments: list[Segment]) -> None:
    """For a reader, who changes nothing: what has no line in the index may be torn, or still be on its way."""
    steps = size = 0
    for segment in _unfinished(folder, segments):
        whole = segment.undamaged()
        if whole < len(segment.records):
            raise UserError(
                f"'{folder}': the data of episode {segment.records[whole].number} are damaged; "
                "open the folder once without read_only, which drops the damaged end"
            )
        torn_steps, torn_bytes = segment.torn(layout)
        steps, size = steps + torn_steps, size + torn_bytes
    if size:
        log.info("%s: not read: %d steps of an episode that is torn or still being written", folder, steps)


def _unfinished(folder: Path, segments: list[Segment]) -> list[Segment]:
    """The last segment, and those after it that have data but no line yet."""
    last = segments[-1].number if segments else -1
    begun = [number for number in segment_numbers(folder, ".data") if number > last]
    return [*segments[-1:], *(Segment(folder, number) for number in begun)]
