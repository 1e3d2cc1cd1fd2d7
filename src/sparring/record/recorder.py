"""Recorder: the only writer of metrics and videos in a run folder, and the sinks that receive them as well.

TensorBoard and Weights & Biases are extras, imported only if used.
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
from sparring.record.videos import ENCODER_TIMEOUT_S, VideoWriter

log = logging.getLogger(LOGGER)

# timeout of the encoder after an error: short, so that the error is shown soon and within the timeout of `launch`
AFTER_AN_ERROR_S = 2.0
FLUSH_S = 10  # maximum delay of TensorBoard's files
UPLOAD_S = 300.0  # timeout of uploads at the end of a run
_START_S = 90.0  # timeout of the start of W&B
_SINK_S = 60.0  # timeout of a sink for a line or a video, which it should only put into a queue


class Sink(Protocol):
    """Another destination for finite numbers, under their names with a group, and for complete videos. An exception
    during a run removes the sink; the run continues."""

    def write(self, update: int, numbers: dict[str, float]) -> None: ...
    def video(self, name: str, path: Path) -> None: ...
    def close(self, failed: bool) -> None: ...


class Recorder:
    """Writes `episode_metrics.jsonl`, `evaluations.jsonl`, `timeline.jsonl` and `videos`; without a folder, nothing.
    Numbers and videos go to the `sinks` as well. As a context manager it waits for the encoder on exit."""

    def __init__(
        self, folder: Path | None, sinks: list[Sink] | None = None, rerun: bool = False, video_share: float = 1.0
    ):
        self.folder = folder
        parent = folder or Path()  # without a folder nothing is written
        self._metrics, self._timeline = RowFile(parent / "episode_metrics.jsonl"), RowFile(parent / "timeline.jsonl")
        self._evaluations = RowFile(parent / "evaluations.jsonl")
        self.sinks = sinks or []
        # complete videos, from the encoder's thread; only the main thread starts calls of sinks
        self._complete: deque[Path] = deque()
        self.videos: VideoWriter | None = None
        if folder is not None:
            self.videos = VideoWriter(folder, rerun, lambda file, line: self._complete.append(file), video_share)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind, *_) -> None:
        if self.videos is not None:
            # after a second interrupt, do not wait
            self.videos.finish(0.0 if kind is KeyboardInterrupt else AFTER_AN_ERROR_S if kind else ENCODER_TIMEOUT_S)
            self._send_videos()
        if kind is not None:
            self.close(failed=True)

    def write(self, progress: Progress, metrics: dict[str, float], accuracy: str | None = None) -> None:
        """Write a row of metrics, given under their short names; `accuracy`: the name of the one that is `avg_acc`."""
        plain = {"episode": progress.episodes, "avg_loss": metrics.get("loss")}
        plain["avg_acc"] = metrics.get(accuracy) if accuracy else None
        plain |= {"episode_reward": metrics.get("episode_reward"), "total_steps": progress.env_steps}
        plain |= {"lr": metrics.get("lr"), "update": progress.updates}
        flat = ("loss", "episode_reward", "lr")
        rest: dict[str, float | None] = {file_name(name): value for name, value in metrics.items() if name not in flat}
        if self.folder is not None:
            self._metrics.append([_stamped(plain | rest)])
        self._to_sinks(progress.updates, {FLAT[name][0]: value for name, value in plain.items()} | rest)
        self._send_videos()

    def evaluation(self, progress: Progress, numbers: dict[str, float | None]) -> None:
        """Write a row of evaluations.jsonl; it replaces a row of the same update."""
        numbers = {f"eval/{name}": value for name, value in numbers.items()}
        if self.folder is not None:
            self._evaluations.keep(lambda row: row["update"] < progress.updates)
            so_far = {"update": progress.updates, "total_steps": progress.env_steps, "episode": progress.episodes}
            self._evaluations.append([_stamped(so_far | numbers)])
        self._to_sinks(progress.updates, numbers)

    def evaluations(self) -> list[dict]:
        """Returns the rows so far, without damaged ones."""
        return self._evaluations.read() if self.folder is not None else []

    def timeline(self, spans: list[Span]) -> None:
        """Write rows of timeline.jsonl."""
        if self.folder is not None and spans:
            self._timeline.append(map(vars, spans))

    def close(self, failed: bool = False) -> None:
        self._each_sink(lambda sink: sink.close(failed), UPLOAD_S + _SINK_S)
        self.sinks = []

    def state_dict(self) -> dict:
        """Returns the row counts of the files, after flushing them to the disk."""
        files = {"metrics": self._metrics, "timeline": self._timeline, "evaluations": self._evaluations}
        if self.folder is not None:
            for file in files.values():
                file.flush()
        return {f"{name}_rows": file.last if self.folder else 0 for name, file in files.items()}

    def load_state_dict(self, state: dict, updates: int) -> list[str]:
        """Remove rows that were written after the checkpoint, because the resumed run writes them again. Returns
        descriptions of lost or altered rows before the checkpoint."""
        if self.folder is None:
            return []
        # cut evaluations by update, not by row count: an update is evaluated after its checkpoint is saved
        cuts = {"metrics_rows": (self._metrics, True), "timeline_rows": (self._timeline, True)}
        cuts["evaluations_rows"] = (self._evaluations, False)
        lost = [f"'{file.path}': {what}" for key, (file, cut) in cuts.items() for what in file.rewind(state[key], cut)]
        self._evaluations.keep(lambda row: row["update"] <= updates)
        return lost

    def _to_sinks(self, update: int, numbers: dict[str, float | None]) -> None:
        finite = {name: float(value) for name, value in numbers.items() if value is not None and _is_finite(value)}
        self._each_sink(lambda sink: sink.write(update, finite))

    def _send_videos(self) -> None:
        while self._complete:
            file = self._complete.popleft()
            self._each_sink(lambda sink, file=file: sink.video(file.stem, file))  # type: ignore[misc]

    def _each_sink(self, call: Callable[[Sink], None], timeout_s: float | None = None) -> None:
        for sink in list(self.sinks):
            try:
                _within(timeout_s or _SINK_S, partial(call, sink))
            except Exception as error:  # a sink is third-party code; training continues without it
                self.sinks.remove(sink)
                log.warning("%s failed and gets no more numbers: %s", type(sink).__name__, error)


def _stamped(row: dict) -> dict:
    """Returns the row with a timestamp. NaN and infinity become null, because JSON has neither."""
    clean = {name: value if _is_finite(value) else None for name, value in row.items()}
    return clean | {"timestamp": time.time()}


def _within(seconds: float, call: Callable[[], None]) -> None:
    """Make the call in a separate thread and wait for it at most so many seconds."""
    done: Future[None] = Future()

    def work() -> None:
        try:
            call()
            done.set_result(None)
        except Exception as error:  # raised again below, in the calling thread
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
    """Raise UserError if a setting needs an optional package that is not installed."""
    # name of the extra and of its module -> is it needed, the setting, the package
    extras = {
        "tensorboard": (config.tensorboard, "tensorboard=true", "tensorboard"),
        "wandb": (config.mode != "disabled", f"mode={config.mode}", "wandb"),
        "rerun": (config.rerun, "rerun=true", "rerun-sdk"),
    }
    for extra, (needed, setting, package) in extras.items():
        if needed and find_spec(extra) is None:
            install = f'pip install "sparring[{extra}]"'
            raise UserError(f"logging.{setting} needs the package {package}: {install}, or remove the setting")


def make_sinks(config: Config, folder: Path, update: int) -> list[Sink]:
    """Create the sinks of the section `logging`; `update`: the number of updates so far."""
    sinks: list[Sink] = []
    if config.logging.tensorboard:
        sinks.append(TensorBoard(folder, update))
    if config.logging.mode != "disabled":
        sinks.append(_WeightsAndBiases(config.logging, folder, config.dump()))
    return sinks


class TensorBoard:
    """Writes events to `<run folder>/tensorboard` in a separate thread, without TensorFlow."""

    def __init__(self, folder: Path, update: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer = EventFileWriter(str(folder / "tensorboard"), flush_secs=FLUSH_S)
        self._event, self._summary = Event, Summary
        # hides later updates of an earlier process: this run repeats them
        self._add(update + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, update: int, numbers: dict[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(update, summary=self._summary(value=values))

    def video(self, name: str, path: Path) -> None:
        """Does nothing: TensorBoard shows no MP4; the files are in videos/."""

    def close(self, failed: bool) -> None:
        self.writer.close()

    def _add(self, update: int, **content: Any) -> None:
        self.writer.add_event(self._event(wall_time=time.time(), step=update, **content))


class _WeightsAndBiases:
    """One W&B run per run folder, also if it is resumed; its steps are updates. A process of W&B uploads."""

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
                # in mode offline every process writes a part; `wandb sync` joins parts with the same id
                resume="allow" if config.mode == "online" else None,
                mode=config.mode,
                dir=folder,
                config=settings,
                # messages are in the logs of the run
                settings=wandb.Settings(console="off", silent=True, init_timeout=_START_S, finish_timeout=UPLOAD_S),
            )
        except (wandb.Error, OSError) as error:
            reason = str(error).rstrip(".")
            advice = "log in (wandb login), or use logging.mode=offline and upload later (wandb sync)"
            raise UserError(f"logging.mode={config.mode}: Weights & Biases did not start: {reason}; {advice}") from None

    def write(self, update: int, numbers: dict[str, float]) -> None:
        # W&B ignores steps that it already has; a resumed run repeats those after its checkpoint
        self.run.log(numbers, step=update)

    def video(self, name: str, path: Path) -> None:
        import wandb

        # one panel per robot number, as in rollout_000051_0: a step holds only one video per key
        kind, _, *number = name.split("_")
        key = "_".join(["videos/" + kind, *number[-1:]])
        # to the current step: encoding ends later than the step of the video
        self.run.log({key: wandb.Video(str(path), caption=name, format="mp4")}, commit=False)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))
