"""Recorder: the only writer of numbers and pictures in a run folder."""

import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from sparring.collect.stages import Span
from sparring.record.pictures import filmstrip, write_png, write_video


class Recorder:
    """Writes `episode_metrics.jsonl`, `timeline.jsonl`, `samples/*.png` and `videos/*.mp4` under a folder.

    Without one, nothing.
    """

    def __init__(self, folder: Path | None):
        self.folder = folder

    @property
    def metrics_file(self) -> Path:
        return self.folder / "episode_metrics.jsonl"

    def write(self, metrics: dict[str, float]) -> None:
        """One line of JSON; numbers that are not finite become null, so that every reader can read it."""
        if self.folder is None:
            return
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(clean | {"timestamp": time.time()}) + "\n")

    def timeline(self, spans: list[Span]) -> None:
        """Who was at which stage, from when to when: lines of timeline.jsonl."""
        if self.folder is not None and spans:
            with (self.folder / "timeline.jsonl").open("a") as file:
                file.writelines(json.dumps(asdict(span)) + "\n" for span in spans)

    def image(self, name: str, picture: np.ndarray) -> Path | None:
        """`[H, W, 3]` uint8 as samples/<name>.png."""
        return write_png(self.folder / "samples" / f"{name}.png", picture) if self.folder else None

    def video(self, name: str, frames: list[np.ndarray], fps: float) -> Path | None:
        """`[H, W, 3]` uint8 frames as videos/<name>.mp4 (H.264)."""
        return write_video(self.folder / "videos" / f"{name}.mp4", frames, fps) if self.folder else None

    def film(self, name: str, frames: list[np.ndarray], fps: float) -> Path | None:
        """An episode as a video and as a strip of pictures."""
        self.image(name, filmstrip(frames))
        return self.video(name, frames, fps)

    def state_dict(self) -> dict:
        exists = self.folder is not None and self.metrics_file.exists()
        return {"metrics_bytes": self.metrics_file.stat().st_size if exists else 0}

    def load_state_dict(self, state: dict) -> None:
        """Forget lines that a run wrote after the checkpoint it now goes on from: it will write them again."""
        if self.folder is not None and self.metrics_file.exists():
            size = self.metrics_file.stat().st_size
            os.truncate(self.metrics_file, min(size, state["metrics_bytes"]))
