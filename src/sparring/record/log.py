"""Messages: to the console, and to files in the run folder's logs/, with _YYYYMMDD_HHMMSS in each name.

rl_training.log has all messages but the DEBUG lines of env/env.log, normalizer/normalizer.log, training/training.log;
train.log links to the newest rl_training.log of a process that trained.
"""

import logging
import time
from collections import deque
from pathlib import Path

from torch import nn

from sparring.normalize import Normalizer
from sparring.record.configs import LoggingConfig

LOGGER = "sparring"
PARTS = ("env", "normalizer", "training")  # loggers with a file of their own
_KEPT_EARLY = 1000  # messages that are kept until there is a folder for them


class RunLog:
    """The handlers of one run's messages. Messages before `open_files` are kept for the files."""

    def __init__(self, config: LoggingConfig, quiet: bool = False, rank: int = 0):
        """`quiet`: errors only; a `rank` other than the main process: warnings only."""
        self.config = config
        self.folder: Path | None = None
        console = logging.StreamHandler()
        level = logging.getLevelName(config.console_level)
        console.setLevel(logging.ERROR if quiet else max(level, logging.WARNING) if rank else level)
        console.setFormatter(logging.Formatter(f"[process {rank}] %(message)s" if rank else "%(message)s"))
        self.early = _EarlyMessages()
        self.handlers: list[logging.Handler] = [console, self.early]
        self.activate()

    def open_files(self, folder: Path | None) -> None:
        self.folder = folder
        self.handlers.remove(self.early)
        if folder is not None and self.config.enable_file_logging:
            stamp = time.strftime("%Y%m%d_%H%M%S")
            for part in ("", *PARTS):
                path = folder / "logs" / part / f"{part or 'rl_training'}_{stamp}.log"
                path.parent.mkdir(parents=True, exist_ok=True)
                file = logging.FileHandler(path)
                file.setLevel(self.config.file_level)
                file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
                file.addFilter(logging.Filter(f"{LOGGER}.{part}") if part else _is_for_all)
                for record in self.early.records:
                    if record.levelno >= file.level:
                        file.handle(record)
                self.handlers.append(file)
        self.activate()

    def activate(self) -> None:
        """Take the messages, also after another run of this process did; closed files open again on their own."""
        logger = logging.getLogger(LOGGER)
        for handler in [handler for handler in logger.handlers if handler not in self.handlers]:
            logger.removeHandler(handler)
            handler.close()
        for handler in self.handlers:
            logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(min(handler.level for handler in self.handlers))  # what no handler keeps is never formatted

    def link(self) -> None:
        files = [Path(handler.baseFilename) for handler in self.handlers if isinstance(handler, logging.FileHandler)]
        if self.folder is not None and files:
            link = self.folder / "train.log"
            link.unlink(missing_ok=True)
            try:
                link.symlink_to(Path("logs", files[0].name))
            except OSError:  # some file systems know no links; the log itself is there
                pass

    def update(self, update: int, metrics: dict[str, float]) -> None:
        log = logging.getLogger(f"{LOGGER}.training")
        if log.isEnabledFor(logging.DEBUG):
            log.debug("update %d: %s", update, ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))

    def normalizers(self, update: int, model: nn.Module) -> None:
        log = logging.getLogger(f"{LOGGER}.normalizer")
        if not log.isEnabledFor(logging.DEBUG):
            return
        for name, module in model.named_modules():
            # one that has seen no numbers yet has nothing to say
            if isinstance(module, Normalizer) and (module.fitted or getattr(module, "count", True)):
                log.debug("update %d: %s: %s", update, name, module.in_words())


class _EarlyMessages(logging.Handler):
    def __init__(self):
        super().__init__(logging.DEBUG)
        self.records: deque[logging.LogRecord] = deque(maxlen=_KEPT_EARLY)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def _is_for_all(record: logging.LogRecord) -> bool:
    """People read the main log: details of the parts are in files of their own."""
    return record.levelno > logging.DEBUG or record.name not in [f"{LOGGER}.{part}" for part in PARTS]
