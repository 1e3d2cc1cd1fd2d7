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
    wanted = {"tensorboard": logging.tensorboard and "tensorboard=true"}
    wanted["wandb"] = logging.mode != "disabled" and f"mode={logging.mode}"
    for package, setting in wanted.items():
        if setting and find_spec(package) is None:
            raise UserError(
                f"logging.{setting} needs the package {package}: pip install 'sparring[{package}]', or leave it out"
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
