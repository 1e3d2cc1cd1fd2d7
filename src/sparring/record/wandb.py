"""Numbers and videos in Weights & Biases, or in `<run folder>/wandb` until `wandb sync`. Needs the extra `wandb`.

A process of W&B's own writes all of it to disk and uploads; where the network fails it tries again, and training does
not wait for it.
"""

import uuid
from pathlib import Path

import wandb

from sparring.errors import UserError
from sparring.record.configs import LoggingConfig

# how long the end of a run waits for what is not uploaded yet
UPLOAD_S = 300.0


class WeightsAndBiases:
    """A run of theirs for a run folder, also after a stop; its steps are updates."""

    def __init__(self, logging: LoggingConfig, folder: Path, config: dict):
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
