"""Where numbers go beside the files of the run folder: TensorBoard, Weights & Biases. Their packages are extras."""

from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from sparring.errors import UserError


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
        from sparring.record.tensorboard import TensorBoard

        sinks.append(TensorBoard(folder, update))
    if config.logging.mode != "disabled":
        from sparring.record.wandb import WeightsAndBiases

        sinks.append(WeightsAndBiases(config.logging, folder, config.dump()))
    return sinks
