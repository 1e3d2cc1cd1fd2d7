"""Optional packages that record a run: TensorBoard, Weights & Biases. They are extras, imported where used."""

import time
import uuid
from pathlib import Path
from typing import Any, Protocol

from sparring.config.schema import Config
from sparring.errors import UserError
from sparring.record.configs import LoggingConfig

FLUSH_S = 10  # age of what a browser shows of TensorBoard, at most
UPLOAD_S = 300.0  # how long the end of a run waits for uploads


class Sink(Protocol):
    """Takes numbers besides the run folder. An exception while a run goes on ends the sink, not the run."""

    def write(self, update: int, numbers: dict[str, float]) -> None:
        """Finite numbers, by their names in groups."""

    def video(self, name: str, path: Path) -> None:
        """A complete video."""

    def close(self, failed: bool) -> None:
        """The run is over."""


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

    def __init__(self, logging: LoggingConfig, folder: Path, settings: dict):
        import wandb

        id_file = folder / "wandb" / "id"  # the same id for every process that trains in this folder
        if not id_file.exists():
            id_file.parent.mkdir(exist_ok=True)
            id_file.write_text(uuid.uuid4().hex[:12])
        try:
            self.run = wandb.init(
                project=logging.project,
                name=logging.name or folder.resolve().name,
                id=id_file.read_text().strip(),
                # offline every process leaves a part, which `wandb sync` joins by their id
                resume="allow" if logging.mode == "online" else None,
                mode=logging.mode,
                dir=folder,
                config=settings,
                # messages go to our logs
                settings=wandb.Settings(console="off", silent=True, finish_timeout=UPLOAD_S),
            )
        except (wandb.Error, OSError) as error:
            reason = str(error).rstrip(".")
            raise UserError(
                f"logging.mode={logging.mode}: Weights & Biases did not start: {reason}; log in (wandb login), or use "
                "logging.mode=offline and upload later (wandb sync)"
            ) from None

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
