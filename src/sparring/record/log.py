"""Messages: to the console for people, to a file in the run folder for later."""

import logging
from pathlib import Path

LOGGER = "sparring"


def set_up_logging(config, folder: Path | None, quiet: bool) -> None:
    """Console and file handlers of the `sparring` logger; quiet: only errors reach the console."""
    logger = logging.getLogger(LOGGER)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    console = logging.StreamHandler()
    console.setLevel(logging.ERROR if quiet else config.console_level)
    console.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(console)
    if folder is not None and config.enable_file_logging:
        file = logging.FileHandler(folder / "train.log")
        file.setLevel(config.file_level)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(file)
