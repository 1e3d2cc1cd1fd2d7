"""The `logging` section. Torch-free."""

from typing import Literal

from pydantic import Field

from sparring.config import Section

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class LoggingConfig(Section):
    """What is said where."""

    console_level: Level = Field("INFO", description="least important message shown on the console")
    file_level: Level = Field("DEBUG", description="least important message kept in the run folder's log")
    mode: Literal["disabled"] = Field(
        "disabled", description="external loggers; there are none: all numbers are files of the run folder"
    )
    enable_file_logging: bool = Field(True, description="keep a log file in the run folder")
    rerun: bool = Field(False, description="also keep what is filmed as recording.rrd, for the Rerun viewer")
