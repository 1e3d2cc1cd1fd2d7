"""Numbers for TensorBoard, in `<run folder>/tensorboard`. Needs the extra `tensorboard`, but no TensorFlow."""

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

# how old what a browser shows may be
FLUSH_S = 10


class TensorBoard:
    """Its own thread writes; one event holds all numbers of a line."""

    def __init__(self, folder: Path, update: int):
        self.writer = EventFileWriter(str(folder / "tensorboard"), flush_secs=FLUSH_S)
        # what an earlier process wrote of updates to come is not shown: they are made again
        self._add(update + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, update: int, numbers: dict[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(update, summary=Summary(value=values))

    def video(self, name: str, path: Path) -> None:
        """It shows no MP4; the files are in videos/."""

    def close(self, failed: bool) -> None:
        self.writer.close()

    def _add(self, update: int, **what) -> None:
        self.writer.add_event(Event(wall_time=time.time(), step=update, **what))
