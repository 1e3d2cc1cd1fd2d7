"""A recording for the Rerun viewer: every filmed episode with its cameras, states, actions and rewards."""

import io
from pathlib import Path

import numpy as np

from sparring.collect.camera import Film
from sparring.phases.replay import Foretold

_JPEG_QUALITY = 85


class RerunFile:
    """`recording.rrd` under a folder; a run that goes on writes `recording-2.rrd`, ...: the viewer opens all as one.

    An episode is an entity of its video's name, on the timeline `step` (of predictions, `decision`):
    `<name>/camera/<camera>`, `<name>/state`, `action`, `reward`, `value`; of predictions `<name>/true/<camera>` and
    `<name>/predicted/<camera>` instead of cameras, and no value.
    """

    def __init__(self, folder: Path):
        # here, before training: it takes half a second
        import rerun

        self._rerun, self._stream, self.folder = rerun, None, folder

    def film(self, name: str, film: Film, views: dict[str, list[np.ndarray]]) -> None:
        for camera, pictures in views.items():
            self._pictures("step", f"{name}/camera/{camera}", pictures)
        self._numbers("step", name, film)
        # before the first step there is no reward, after the last no decision
        self._series("step", f"{name}/reward", film.rewards, first=1)
        if np.isfinite(film.values).any():
            self._series("step", f"{name}/value", film.values)

    def prediction(self, name: str, foretold: Foretold) -> None:
        for kind, cameras in (("true", foretold.true), ("predicted", foretold.predicted)):
            for camera, pictures in cameras.items():
                self._pictures("decision", f"{name}/{kind}/{camera}", list(pictures), first=1)
        self._numbers("decision", name, foretold)
        self._series("decision", f"{name}/reward", foretold.rewards, first=1)

    def flush(self) -> None:
        """Let the file hold all there is so far."""
        if self._stream is not None:
            self._stream.flush()

    def _numbers(self, timeline: str, name: str, episode: Film | Foretold) -> None:
        for part, rows in (("state", episode.states), ("action", episode.actions)):
            if rows.shape[1]:
                self._series(timeline, f"{name}/{part}", rows)

    def _series(self, timeline: str, entity: str, values: np.ndarray, first: int = 0) -> None:
        """`[T]` or `[T, K]`, the first of them at moment `first`."""
        columns = self._rerun.Scalars.columns(scalars=values.astype(np.float64).ravel())
        if values.ndim == 2:
            columns = columns.partition([values.shape[1]] * len(values))
        self._send(timeline, entity, len(values), first, columns)

    def _pictures(self, timeline: str, entity: str, pictures: list[np.ndarray], first: int = 0) -> None:
        blobs = [_jpeg(picture) for picture in pictures]
        columns = self._rerun.EncodedImage.columns(blob=blobs, media_type=["image/jpeg"] * len(blobs))
        self._send(timeline, entity, len(blobs), first, columns)

    def _send(self, timeline: str, entity: str, count: int, first: int, columns) -> None:
        if self._stream is None:
            self._stream = self._rerun.RecordingStream("sparring", recording_id=str(self.folder.resolve()))
            self._stream.save(_free(self.folder))
        times = self._rerun.TimeColumn(timeline, sequence=range(first, first + count))
        self._stream.send_columns(entity, [times], columns)


def _free(folder: Path) -> Path:
    path, number = folder / "recording.rrd", 2
    while path.exists():
        path, number = folder / f"recording-{number}.rrd", number + 1
    return path


def _jpeg(picture: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(file, "JPEG", quality=_JPEG_QUALITY)
    return file.getvalue()
