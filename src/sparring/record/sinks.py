"""Where numbers go besides the run folder."""

import time
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from sparring.errors import UserError
from sparring.record.configs import LoggingConfig

# ---- Numbers for TensorBoard, in `<run folder>/tensorboard`. Needs the extra `tensorboard`, but no TensorFlow.


# how old what a browser shows may be
FLUSH_S = 10


class TensorBoard:
    """Its own thread writes; one event holds all numbers of a line."""

    def __init__(self, folder: Path, update: int):
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer = EventFileWriter(str(folder / "tensorboard"), flush_secs=FLUSH_S)
        # what an earlier process wrote of updates to come is not shown: they are made again
        self._add(update + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, update: int, numbers: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(update, summary=Summary(value=values))

    def video(self, name: str, path: Path) -> None:
        """It shows no MP4; the files are in videos/."""

    def close(self, failed: bool) -> None:
        self.writer.close()

    def _add(self, update: int, **what) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.add_event(Event(wall_time=time.time(), step=update, **what))


# ---- Numbers and videos in Weights & Biases, or in `<run folder>/wandb` until `wandb sync`. Needs the extra `wandb`.
#
# A process of W&B's own writes all of it to disk and uploads; where the network fails it tries again, and training does
# not wait for it.


# how long the end of a run waits for what is not uploaded yet
UPLOAD_S = 300.0


class WeightsAndBiases:
    """A run of theirs for a run folder, also after a stop; its steps are updates."""

    def __init__(self, logging: LoggingConfig, folder: Path, config: dict):
        import wandb

        try:
            self.run = wandb.init(
                project=logging.project,
                name=logging.name or folder.resolve().name,
                id=_kept_id(folder),
                # offline every process leaves a part, which `wandb sync` joins by their id
                resume="allow" if logging.mode == "online" else None,
                mode=logging.mode,
                dir=folder,
                config=config,
                # what is said goes to our logs
                settings=wandb.Settings(console="off", silent=True, finish_timeout=UPLOAD_S),
            )
        except (wandb.Error, OSError) as error:
            told = str(error).rstrip(".")
            raise UserError(
                f"logging.mode={logging.mode}: Weights & Biases did not start: {told}; log in (wandb login), or use "
                "logging.mode=offline and upload later (wandb sync)"
            ) from None

    def write(self, update: int, numbers: dict[str, float]) -> None:
        # steps that it has had before, of a run that went back to its last checkpoint, it leaves as they were
        self.run.log(numbers, step=update)

    def video(self, name: str, path: Path) -> None:
        # a panel for each place, as in rollout_000051_0: of two with one key a step would keep the second only
        kind, _, *place = name.split("_")
        key = "_".join(["videos/" + kind, *place[-1:]])
        # with the step that is open: videos are complete when they are
        import wandb

        self.run.log({key: wandb.Video(str(path), caption=name, format="mp4")}, commit=False)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


def _kept_id(folder: Path) -> str:
    """Of the run folder, for good."""
    file = folder / "wandb" / "id"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(uuid.uuid4().hex[:12])
    return file.read_text().strip()


# ---- Where numbers go beside the files of the run folder: TensorBoard, Weights & Biases. Their packages are extras.


class Sink(Protocol):
    """What it raises while a run goes on ends the sink, not the run."""

    def write(self, update: int, numbers: dict[str, float]) -> None:
        """Finite numbers, by their names in groups."""

    def video(self, name: str, path: Path) -> None:
        """A video that is complete."""

    def close(self, failed: bool) -> None:
        """The run is over."""


def check_installed(logging) -> None:
    """Tells what is missing for a `logging` section, before anything is built."""
    # what is imported, by the name of the extra -> whether and how it is asked for, and its package
    wanted = {
        "tensorboard": (logging.tensorboard, "tensorboard=true", "tensorboard"),
        "wandb": (logging.mode != "disabled", f"mode={logging.mode}", "wandb"),
        "rerun": (logging.rerun, "rerun=true", "rerun-sdk"),
    }
    for extra, (asked, setting, package) in wanted.items():
        if asked and find_spec(extra) is None:
            raise UserError(
                f"logging.{setting} needs the package {package}: pip install 'sparring[{extra}]', or leave it out"
            )


def make_sinks(config, folder: Path, update: int) -> list[Sink]:
    """Those that the `logging` section of a run's config asks for; `update`: how far the run has come."""
    sinks: list[Sink] = []
    if config.logging.tensorboard:
        sinks.append(TensorBoard(folder, update))
    if config.logging.mode != "disabled":
        sinks.append(WeightsAndBiases(config.logging, folder, config.dump()))
    return sinks
