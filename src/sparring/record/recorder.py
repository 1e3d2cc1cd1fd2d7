"""Recorder: the only writer of numbers and videos in a run folder; and the sinks that get them too.

TensorBoard and Weights & Biases are extras, imported where used.
"""

import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from sparring.collect.collector import Span
from sparring.config.schema import Config
from sparring.errors import UserError
from sparring.phases.configs import LoggingConfig
from sparring.phases.phase import Progress
from sparring.processes.files import write_whole
from sparring.processes.rows import RowFile
from sparring.record.log import LOGGER
from sparring.record.names import FLAT, file_name
from sparring.record.videos import PATIENCE_S, VideoWriter

log = logging.getLogger(LOGGER)

# seconds for videos that are being encoded: the error is shown soon, and before `launch` loses its patience
AFTER_AN_ERROR_S = 2.0
FLUSH_S = 10  # age of what a browser shows of TensorBoard, at most
UPLOAD_S = 300.0  # how long the end of a run waits for uploads
_START_S = 90.0  # how long its beginning waits for W&B
_SINK_S = 60.0  # what a sink gets to take a line or a video; they only put it into a queue of their own


class Sink(Protocol):
    """Takes finite numbers, by their names in groups, and complete videos, besides the run folder. An exception while a
    run goes on ends the sink, not the run."""

    def write(self, update: int, numbers: dict[str, float]) -> None: ...
    def video(self, name: str, path: Path) -> None: ...
    def close(self, failed: bool) -> None: ...


class Recorder:
    """Writes `episode_metrics.jsonl`, `evaluations.jsonl`, `timeline.jsonl` and `videos`; without a folder, nothing.
    Numbers and videos go to the `sinks`, too. As a context it waits, at its end, for the encoder."""

    def __init__(
        self, folder: Path | None, sinks: list[Sink] | None = None, rerun: bool = False, video_share: float = 1.0
    ):
        self.folder = folder
        place = folder or Path()  # nothing is written where there is no folder
        self._metrics, self._timeline = RowFile(place / "episode_metrics.jsonl"), RowFile(place / "timeline.jsonl")
        self._evaluations = RowFile(place / "evaluations.jsonl")
        self.sinks = sinks or []
        # complete videos, from the encoder's thread; sinks are used in this one only
        self._complete: deque[Path] = deque()
        self.videos: VideoWriter | None = None
        if folder is not None:
            self.videos = VideoWriter(folder, rerun, lambda file, line: self._complete.append(file), video_share)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind, *_) -> None:
        if self.videos is not None:
            # who interrupts twice does not want to wait
            self.videos.finish(0.0 if kind is KeyboardInterrupt else AFTER_AN_ERROR_S if kind else PATIENCE_S)
            self._share_videos()
        if kind is not None:
            self.close(failed=True)

    def write(self, progress: Progress, metrics: dict[str, float], accuracy: str | None = None) -> None:
        """A line of metrics by their short names; `accuracy`: which of them is `avg_acc`."""
        plain = {"episode": progress.episodes, "avg_loss": metrics.get("loss")}
        plain["avg_acc"] = metrics.get(accuracy) if accuracy else None
        plain |= {"episode_reward": metrics.get("episode_reward"), "total_steps": progress.env_steps}
        plain |= {"lr": metrics.get("lr"), "update": progress.updates}
        flat = ("loss", "episode_reward", "lr")
        rest: dict[str, float | None] = {file_name(name): value for name, value in metrics.items() if name not in flat}
        if self.folder is not None:
            self._metrics.append([_stamped(plain | rest)])
        self._to_sinks(progress.updates, {FLAT[name][0]: value for name, value in plain.items()} | rest)
        self._share_videos()

    def evaluation(self, progress: Progress, numbers: dict[str, float | None]) -> None:
        """A line of evaluations.jsonl; it replaces one of the same update."""
        numbers = {f"eval/{name}": value for name, value in numbers.items()}
        if self.folder is not None:
            self._evaluations.keep(lambda row: row["update"] < progress.updates)
            so_far = {"update": progress.updates, "total_steps": progress.env_steps, "episode": progress.episodes}
            self._evaluations.append([_stamped(so_far | numbers)])
        self._to_sinks(progress.updates, numbers)

    def evaluations(self) -> list[dict]:
        """The rows so far, but for those that are not as they were written."""
        return self._evaluations.read() if self.folder is not None else []

    def timeline(self, spans: list[Span]) -> None:
        """Who was at which stage, from when to when: rows of timeline.jsonl."""
        if self.folder is not None and spans:
            self._timeline.append(map(vars, spans))

    def close(self, failed: bool = False) -> None:
        self._each_sink(lambda sink: sink.close(failed), UPLOAD_S + _SINK_S)
        self.sinks = []

    def state_dict(self) -> dict:
        """What it counts on is on the disk when this returns."""
        files = {"metrics": self._metrics, "timeline": self._timeline, "evaluations": self._evaluations}
        if self.folder is not None:
            for file in files.values():
                file.flush()
        return {f"{name}_rows": file.last if self.folder else 0 for name, file in files.items()}

    def load_state_dict(self, state: dict, updates: int) -> list[str]:
        """Remove rows that were written after the checkpoint: the resumed run writes them again. Returns what is lost
        or altered of those before it, in words."""
        if self.folder is None:
            return []
        # evaluations go by their update: it is evaluated after it is saved
        cuts = {"metrics_rows": (self._metrics, True), "timeline_rows": (self._timeline, True)}
        cuts["evaluations_rows"] = (self._evaluations, False)
        told = [f"'{file.path}': {what}" for key, (file, cut) in cuts.items() for what in file.go_back(state[key], cut)]
        self._evaluations.keep(lambda row: row["update"] <= updates)
        return told

    def _to_sinks(self, update: int, numbers: dict[str, float | None]) -> None:
        finite = {name: float(value) for name, value in numbers.items() if value is not None and _is_finite(value)}
        self._each_sink(lambda sink: sink.write(update, finite))

    def _share_videos(self) -> None:
        while self._complete:
            file = self._complete.popleft()
            self._each_sink(lambda sink, file=file: sink.video(file.stem, file))  # type: ignore[misc]

    def _each_sink(self, call: Callable[[Sink], None], patience_s: float | None = None) -> None:
        for sink in list(self.sinks):
            try:
                _within(patience_s or _SINK_S, partial(call, sink))
            except Exception as error:  # a sink is somebody else's code; training goes on without it
                self.sinks.remove(sink)
                log.warning("%s failed and gets no more numbers: %s", type(sink).__name__, error)


def _stamped(row: dict) -> dict:
    """For JSON, which has no NaN and no infinity: they become null."""
    clean = {name: value if _is_finite(value) else None for name, value in row.items()}
    return clean | {"timestamp": time.time()}


def _within(seconds: float, call: Callable[[], None]) -> None:
    """In a thread that nobody waits for any longer than that."""
    done: Future[None] = Future()

    def work() -> None:
        try:
            call()
            done.set_result(None)
        except Exception as error:  # whatever it is, it is raised below
            done.set_exception(error)

    threading.Thread(target=work, name="sink", daemon=True).start()
    try:
        done.result(seconds)
    except TimeoutError:
        if done.done():
            raise
        raise TimeoutError(f"no answer for {seconds:g} seconds") from None


def _is_finite(value: float | int | None) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def check_installed(config: LoggingConfig) -> None:
    """Refuses settings whose optional package is missing."""
    # extra, which is also the module -> whether it is needed, the setting that asks for it, the package
    needed = {
        "tensorboard": (config.tensorboard, "tensorboard=true", "tensorboard"),
        "wandb": (config.mode != "disabled", f"mode={config.mode}", "wandb"),
        "rerun": (config.rerun, "rerun=true", "rerun-sdk"),
    }
    for extra, (asked, setting, package) in needed.items():
        if asked and find_spec(extra) is None:
            install = f'pip install "sparring[{extra}]"'
            raise UserError(f"logging.{setting} needs the package {package}: {install}, or leave it out")


def make_sinks(config: Config, folder: Path, update: int) -> list[Sink]:
    """Those of the `logging` section; `update`: how far the run has come."""
    sinks: list[Sink] = []
    if config.logging.tensorboard:
        sinks.append(TensorBoard(folder, update))
    if config.logging.mode != "disabled":
        sinks.append(_WeightsAndBiases(config.logging, folder, config.dump()))
    return sinks


class TensorBoard:
    """Events in `<run folder>/tensorboard`, written by its own thread; needs no TensorFlow."""

    def __init__(self, folder: Path, update: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer = EventFileWriter(str(folder / "tensorboard"), flush_secs=FLUSH_S)
        self._event, self._summary = Event, Summary
        # hides later updates of an earlier process: they are made again
        self._add(update + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, update: int, numbers: dict[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(update, summary=self._summary(value=values))

    def video(self, name: str, path: Path) -> None:
        """TensorBoard shows no MP4; the files are in videos/."""

    def close(self, failed: bool) -> None:
        self.writer.close()

    def _add(self, update: int, **content: Any) -> None:
        self.writer.add_event(self._event(wall_time=time.time(), step=update, **content))


class _WeightsAndBiases:
    """One W&B run for a run folder, also after a stop; its steps are updates. A process of W&B's own uploads."""

    def __init__(self, config: LoggingConfig, folder: Path, settings: dict):
        import wandb

        id_file = folder / "wandb" / "id"  # the same id for every process that trains in this folder
        if not id_file.exists():
            id_file.parent.mkdir(exist_ok=True)
            write_whole(id_file, uuid.uuid4().hex[:12])
        try:
            self.run = wandb.init(
                project=config.project,
                name=config.name or folder.resolve().name,
                id=id_file.read_text().strip(),
                # offline every process leaves a part, which `wandb sync` joins by their id
                resume="allow" if config.mode == "online" else None,
                mode=config.mode,
                dir=folder,
                config=settings,
                # messages go to our logs
                settings=wandb.Settings(console="off", silent=True, init_timeout=_START_S, finish_timeout=UPLOAD_S),
            )
        except (wandb.Error, OSError) as error:
            reason = str(error).rstrip(".")
            advice = "log in (wandb login), or use logging.mode=offline and upload later (wandb sync)"
            raise UserError(f"logging.mode={config.mode}: Weights & Biases did not start: {reason}; {advice}") from None

    def write(self, update: int, numbers: dict[str, float]) -> None:
        # W&B ignores steps that it already has, of a run that went back to its last checkpoint
        self.run.log(numbers, step=update)

    def video(self, name: str, path: Path) -> None:
        import wandb

        # a panel for each place, as in rollout_000051_0: a step keeps only one video of a key
        kind, _, *place = name.split("_")
        key = "_".join(["videos/" + kind, *place[-1:]])
        # with the step that is open: encoding takes its time
        self.run.log({key: wandb.Video(str(path), caption=name, format="mp4")}, commit=False)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))
