"""The `logging` section. Torch-free."""

from importlib.util import find_spec
from typing import Literal

from pydantic import Field

from sparring.config.section import Section
from sparring.errors import UserError

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class LoggingConfig(Section):
    """What is said where."""

    console_level: Level = Field("INFO", description="least important message shown on the console")
    file_level: Level = Field("DEBUG", description="least important message kept in the run folder's logs")
    enable_file_logging: bool = Field(True, description="keep logs in the run folder")
    tensorboard: bool = Field(False, description="numbers for TensorBoard too; extra `tensorboard`")
    mode: Literal["online", "offline", "disabled"] = Field(
        "disabled", description="Weights & Biases, extra `wandb`; offline: kept for `wandb sync`"
    )
    project: str = Field("sparring", min_length=1, description="project in Weights & Biases")
    name: str | None = Field(None, description="name of the run in Weights & Biases; null: its folder's")
    video_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="share of a run's time that making videos may take; evaluations are filmed anyway; 1: no limit",
    )
    rerun: bool = Field(False, description="also keep what is filmed as recording.rrd, for the Rerun viewer")

    def check_installed(self) -> None:
        # extra, which is also the module -> whether it is needed, the setting that asks for it, the package
        needed = {
            "tensorboard": (self.tensorboard, "tensorboard=true", "tensorboard"),
            "wandb": (self.mode != "disabled", f"mode={self.mode}", "wandb"),
            "rerun": (self.rerun, "rerun=true", "rerun-sdk"),
        }
        for extra, (asked, setting, package) in needed.items():
            if asked and find_spec(extra) is None:
                raise UserError(
                    f"logging.{setting} needs the package {package}: pip install 'sparring[{extra}]', or leave it out"
                )
