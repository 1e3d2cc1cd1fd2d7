"""Recorder: the only writer of numbers and pictures in a run folder."""

import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path

from sparring.collect.stages import Span
from sparring.record.encoder import PATIENCE_S
from sparring.record.films import Films


class Recorder:
    """Writes `episode_metrics.jsonl`, `timeline.jsonl` and, as `films`, videos and pictures under a folder.

    Without one, nothing. As a context it waits, at its end, for what is still being drawn and encoded.
    """

    def __init__(self, folder: Path | None, rerun: bool = False):
        self.folder = folder
        self.films = Films(folder, rerun) if folder else None

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind, *_) -> None:
        if self.films is not None:
            # who interrupts twice does not want to wait
            self.films.finish(0.0 if kind is KeyboardInterrupt else PATIENCE_S)

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

    def state_dict(self) -> dict:
        exists = self.folder is not None and self.metrics_file.exists()
        return {"metrics_bytes": self.metrics_file.stat().st_size if exists else 0}

    def load_state_dict(self, state: dict) -> None:
        """Forget lines that a run wrote after the checkpoint it now goes on from: it will write them again."""
        if self.folder is not None and self.metrics_file.exists():
            size = self.metrics_file.stat().st_size
            os.truncate(self.metrics_file, min(size, state["metrics_bytes"]))
