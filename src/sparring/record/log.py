"""Messages: to the console for people, to files in the run folder for later.

logs/                          (each file also has _YYYYMMDD_HHMMSS in its name, of when its process began)
  rl_training.log              all of them, but for the DEBUG lines of the three below
  env/env.log                  sparring.env: robots made and reset; what worker processes say, and how they died
  normalizer/normalizer.log    sparring.normalizer: statistics, with each line of metrics
  training/training.log        sparring.training: the numbers of each update
train.log -> the newest of the first, of a process that trained
"""

import logging
import time
from collections import deque
from pathlib import Path

from torch import nn

from sparring.normalize import Normalizer

LOGGER = "sparring"
# loggers with a file of their own
PARTS = ("env", "normalizer", "training")
# messages that are kept until there is a folder to write them to
_KEPT_EARLY = 1000


def log_to_console(config, quiet: bool = False, rank: int = 0) -> None:
    """Of one of several processes only warnings, unless it is the main one; quiet: only errors.

    What is said before `log_to_files` is kept for it.
    """
    logger = _taken_down()
    console = logging.StreamHandler()
    level = logging.getLevelName(config.console_level)
    console.setLevel(logging.ERROR if quiet else max(level, logging.WARNING) if rank else level)
    console.setFormatter(logging.Formatter(f"[process {rank}] %(message)s" if rank else "%(message)s"))
    logger.addHandler(console)
    logger.addHandler(_Early())
    logger.setLevel(logging.DEBUG)


def log_to_files(config, folder: Path | None) -> list[logging.Handler]:
    """From now on also to the logs of a run folder, where there is one. By these handlers, for `log_by`."""
    logger = logging.getLogger(LOGGER)
    early = [handler for handler in logger.handlers if isinstance(handler, _Early)]
    files = _files(config, folder) if folder is not None and config.enable_file_logging else []
    for handler in early:
        logger.removeHandler(handler)
    for file in files:
        logger.addHandler(file)
        for record in (record for handler in early for record in handler.records if record.levelno >= file.level):
            file.handle(record)
    # what nobody keeps need not be put into words
    logger.setLevel(min(handler.level for handler in logger.handlers))
    return list(logger.handlers)


def log_by(handlers: list[logging.Handler]) -> None:
    """As before another run of this process was made; files that it closed are opened again by what is said."""
    if logging.getLogger(LOGGER).handlers == handlers:
        return
    logger = _taken_down()
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(min(handler.level for handler in handlers))


def link_log(folder: Path | None, handlers: list[logging.Handler]) -> None:
    """train.log leads to the main one of these logs, which is the first."""
    files = [Path(handler.baseFilename) for handler in handlers if isinstance(handler, logging.FileHandler)]
    if folder is not None and files:
        _link(folder / "train.log", folder / "logs" / files[0].name)


def log_update(update: int, metrics: dict[str, float]) -> None:
    log = logging.getLogger(f"{LOGGER}.training")
    if log.isEnabledFor(logging.DEBUG):
        log.debug("update %d: %s", update, ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))


def log_normalizers(update: int, model: nn.Module) -> None:
    log = logging.getLogger(f"{LOGGER}.normalizer")
    if not log.isEnabledFor(logging.DEBUG):
        return
    for name, module in model.named_modules():
        # one that may see something later says nothing yet
        if isinstance(module, Normalizer) and (module.fitted or getattr(module, "count", 1)):
            log.debug("update %d: %s: %s", update, name, module.in_words())


class _Early(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records: deque[logging.LogRecord] = deque(maxlen=_KEPT_EARLY)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def _taken_down() -> logging.Logger:
    logger = logging.getLogger(LOGGER)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = False
    return logger


def _files(config, folder: Path) -> list[logging.FileHandler]:
    logs, stamp = folder / "logs", time.strftime("%Y%m%d_%H%M%S")
    paths = {part: logs / part / f"{part}_{stamp}.log" for part in PARTS}
    files = []
    for part, path in ({"": logs / f"rl_training_{stamp}.log"} | paths).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(path)
        file.setLevel(config.file_level)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        file.addFilter(logging.Filter(f"{LOGGER}.{part}") if part else _is_for_all)
        files.append(file)
    return files


def _is_for_all(record: logging.LogRecord) -> bool:
    """The main log is read by people: the parts' details are in files of their own."""
    return record.levelno > logging.DEBUG or record.name not in [f"{LOGGER}.{part}" for part in PARTS]


def _link(link: Path, file: Path) -> None:
    if link.exists() and not link.is_symlink():
        # of an earlier version, which had no others
        link.rename(file.with_name("rl_training_earlier.log"))
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(file.relative_to(link.parent))
    except OSError:  # some file systems know no links; the log itself is there
        pass
