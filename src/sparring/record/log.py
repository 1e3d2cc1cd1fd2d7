"""Messages and the live view of a run.

Messages go to the console and to files in logs/ of the run folder, with _YYYYMMDD_HHMMSS in each name: rl_training.log
has all but the DEBUG lines of env/env.log, normalizer/normalizer.log, training/training.log; train.log links to the
newest rl_training.log of a training process. The console shows a live view on a terminal (progress bar, curves,
losses), and plain lines in a pipe.
"""

import logging
import math
import os
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Self, TextIO

import rich.console
from rich.console import Group
from rich.live import Live
from rich.text import Text

from sparring.errors import VisibleFormatter

if TYPE_CHECKING:  # this file imports no torch: `demos` uses it without
    from torch import nn

    from sparring.phases.configs import LoggingConfig

LOGGER = "sparring"
PARTS = ("env", "normalizer", "training")  # loggers with a separate file
_KEPT_EARLY = 1000  # maximum number of messages kept until the run folder exists
EVERY = 0.25  # seconds between two redraws
CELLS = 40  # maximum number of blocks of a curve
BLOCKS, PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
# metric -> label and format, drawn as a curve over the whole run
CURVES = {"success_rate": ("success", "{:.0%}"), "episode_reward": ("reward", "{:.3g}")}
CURVES |= {"contact_share": ("contact", "{:.0%}"), "fresh_acc": ("accuracy", "{:.0%}"), "loss": ("loss", "{:.4g}")}
# line -> metric -> label and format
LINES = {"losses": {"policy_loss": ("policy", "{:.3g}"), "value_loss": ("value", "{:.3g}")}}
LINES["losses"] |= {"wm_loss": ("world model", "{:.3g}"), "entropy": ("entropy", "{:.3g}")}
LINES["losses"] |= {"approx_kl": ("KL", "{:.2g}"), "clip_fraction": ("clipped", "{:.0%}")}
LINES["losses"] |= {"parity": ("parity", "{:.1g}")}
LINES["seconds"] = {"collect_seconds": ("collect", "{:.2f}"), "update_seconds": ("update", "{:.2f}")}
LINES["async"] = {"staleness": ("staleness", "{:.2g}"), "queue_depth": ("queue", "{:.2g}")}
LINES["async"] |= {"actor_idle": ("robots idle", "{:.0%}"), "learner_idle": ("learner idle", "{:.0%}")}
_TERM = "reward/"


class RunLog:
    """The log handlers of one run. Messages before `open_files` are kept and written to the files later."""

    def __init__(self, config: "LoggingConfig", quiet: bool = False, rank: int = 0):
        """`quiet`: print errors only; `rank` above 0: print warnings and errors only."""
        self.config = config
        self.folder: Path | None = None
        console = logging.StreamHandler()
        level = logging.getLevelName(config.console_level)
        console.setLevel(logging.ERROR if quiet else max(level, logging.WARNING) if rank else level)
        console.setFormatter(VisibleFormatter(f"[process {rank}] %(message)s" if rank else "%(message)s"))
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
                file = _LogFile(path)
                file.setLevel(self.config.file_level)
                file.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(message)s"))
                file.addFilter(logging.Filter(f"{LOGGER}.{part}") if part else _is_for_all)
                for record in self.early.records:
                    if record.levelno >= file.level:
                        file.handle(record)
                self.handlers.append(file)
        self.activate()

    def activate(self) -> None:
        """Attach this run's handlers and detach those of an earlier run; a closed file reopens at the next message."""
        logger = logging.getLogger(LOGGER)
        for handler in [handler for handler in logger.handlers if handler not in self.handlers]:
            logger.removeHandler(handler)
            with suppress(OSError):  # a full disk was already reported by `handleError`
                handler.close()
        for handler in self.handlers:
            logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(min(handler.level for handler in self.handlers))  # drop what no handler keeps, unformatted

    def link(self) -> None:
        files = [Path(handler.baseFilename) for handler in self.handlers if isinstance(handler, logging.FileHandler)]
        if self.folder is not None and files:
            link = self.folder / "train.log"
            link.unlink(missing_ok=True)
            try:
                link.symlink_to(Path("logs", files[0].name))
            except OSError:  # some file systems have no links; the log itself exists
                pass

    def update(self, update: int, metrics: dict[str, float]) -> None:
        log = logging.getLogger(f"{LOGGER}.training")
        if log.isEnabledFor(logging.DEBUG):
            log.debug("update %d: %s", update, ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))

    def normalizers(self, update: int, model: "nn.Module") -> None:
        from sparring.normalize import Normalizer

        log = logging.getLogger(f"{LOGGER}.normalizer")
        if not log.isEnabledFor(logging.DEBUG):
            return
        for name, module in model.named_modules():
            # skip normalizers without statistics
            if isinstance(module, Normalizer) and (module.fitted or getattr(module, "count", True)):
                log.debug("update %d: %s: %s", update, name, module.describe())


class _LogFile(logging.FileHandler):
    """Prints one error per file if writing fails; a full disk does not stop the run here."""

    has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.has_failed:
            self.has_failed = True
            print(f"cannot write '{self.baseFilename}' ({error.strerror}); messages may be missing", file=sys.stderr)


class _EarlyMessages(logging.Handler):
    def __init__(self):
        super().__init__(logging.DEBUG)
        self.records: deque[logging.LogRecord] = deque(maxlen=_KEPT_EARLY)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def _is_for_all(record: logging.LogRecord) -> bool:
    """Whether the main log gets the record: DEBUG lines of the parts go to their own files only."""
    return record.levelno > logging.DEBUG or record.name not in [f"{LOGGER}.{part}" for part in PARTS]


class Console:
    def __init__(self, stream: TextIO | None = None, quiet: bool = False, pipe_seconds: float = 5.0, title: str = ""):
        """`pipe_seconds`: minimum time between two lines if `stream` is not a terminal."""
        self.stream, self.quiet, self.pipe_seconds = stream or sys.stderr, quiet, pipe_seconds
        terminal = self.stream.isatty() and os.environ.get("TERM") != "dumb" and not quiet
        self.view = _View(self.stream, title) if terminal else None
        self.last_line = -float("inf")
        self.text = ""  # the newest state as one line
        # (fraction, steps, time) of the first call: speed and remaining time are averages since then
        self.first: tuple[float, int, float] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        self.end()

    def progress(
        self,
        fraction: float,
        steps: int,
        summary: str,
        unit: str = "steps",
        metrics: dict[str, float] | None = None,
        preparing: str | None = None,
    ) -> None:
        """`fraction`: progress, 0..1; `summary`: a few metrics as text; the live view shows `metrics` instead.
        `preparing`: the stage that comes before training, if it is not finished."""
        if self.quiet:
            return
        now = time.monotonic()
        self.first = self.first or (fraction, steps, now)
        done, made, seconds = fraction - self.first[0], steps - self.first[1], now - self.first[2]
        left = seconds * (1 - fraction) / done if done > 0 else float("inf")
        speed = f"{made / seconds:,.{0 if unit == 'steps' else 2}f} {unit}/s" if made else "starting"
        pace = f"{steps:,} {unit}  {speed}  {clock(left)} left"
        pace += f"  {preparing}" if preparing else ""
        self.text = f"{fraction:4.0%}  {pace}  {summary}"
        if self.view:
            self.view.show(fraction, pace, metrics or {}, summary)
        elif now - self.last_line >= self.pipe_seconds or fraction >= 1:
            self.last_line = now
            self.stream.write(self.text + "\n")
            self.stream.flush()

    def end(self) -> None:
        if self.view and self.view.close():
            self.stream.write(self.text + "\n")
            self.stream.flush()


def clock(seconds: float) -> str:
    if seconds == float("inf"):
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class _View:
    """A few lines below the messages, redrawn in place. `show` opens it, also after `close`."""

    def __init__(self, stream: TextIO, title: str):
        self.stream, self.title = stream, title
        self.console = rich.console.Console(file=stream)
        self.plain = self.console.options.ascii_only
        self.live: Live | None = None
        self.drawn = -float("inf")
        self.curves: dict[str, _Curve] = {}
        self.latest: dict[str, float] = {}  # newest value of each metric: some updates lack episode metrics
        self.handlers: list[logging.StreamHandler] = []

    def show(self, fraction: float, pace: str, metrics: dict[str, float], summary: str) -> None:
        """`pace`: steps, speed and remaining time; `summary`: shown if there are no metrics."""
        self.latest |= metrics
        for name in CURVES.keys() & metrics.keys():
            self.curves.setdefault(name, _Curve()).add(metrics[name])
        now = time.monotonic()
        if self.live and now - self.drawn < EVERY and fraction < 1:
            return
        self.drawn = now
        lines = Group(*self.lines(fraction, pace, summary))
        if self.live:
            self.live.update(lines, refresh=True)
            return
        redirect = sys.stdout.isatty()  # output to a piped stdout stays in the pipe
        self.live = Live(lines, console=self.console, auto_refresh=False, transient=True, redirect_stdout=redirect)
        self.live.start(refresh=True)
        # print messages above the view: their handlers hold the original stream
        handlers = logging.getLogger(LOGGER).handlers
        self.handlers = [h for h in handlers if isinstance(h, logging.StreamHandler) and h.stream is self.stream]
        for handler in self.handlers:
            handler.setStream(_Above(self.console))

    def close(self) -> bool:
        if not self.live:
            return False
        for handler in self.handlers:
            handler.setStream(self.stream)
        self.live.stop()
        self.live = None
        return True

    def lines(self, fraction: float, pace: str, summary: str) -> list[Text]:
        bar = max(8, min(40, self.console.width - len(pace) - 8))
        filled = int(bar * fraction)
        full, empty = "#." if self.plain else "█░"
        parts = (full * filled, "green"), (empty * (bar - filled), "bright_black")
        shown = [Text(self.title, "bold")] if self.title else []
        shown.append(Text.assemble(*parts, f" {fraction:4.0%}  {pace}"))
        # the loss is shown only if there is no other curve
        curves = [name for name in CURVES if name in self.curves]
        shown += [self._curve(name) for name in ([name for name in curves if name != "loss"] or curves)]
        terms = [name for name in self.latest if name.startswith(_TERM) and not name.endswith("_normalized")]
        rewards = {"rewards": {name: (name.removeprefix(_TERM), "{:.3g}") for name in terms}}
        for title, metrics in (rewards | LINES).items():
            available = [(*metrics[name], self.latest[name]) for name in metrics if name in self.latest]
            if available:
                values = "  ".join(f"{label} {form.format(value)}" for label, form, value in available)
                shown.append(Text.assemble((f"{title:<10}", "bright_black"), values))
        shown += [Text(summary)] if not self.latest else []
        for text in shown:
            text.no_wrap, text.overflow = True, "ellipsis"
        return shown

    def _curve(self, name: str) -> Text:
        title, form = CURVES[name]
        limits = (0.0, 1.0) if "%" in form else None  # shares use the range 0..100 %
        width = max(8, min(CELLS, self.console.width - 20))
        drawn = _sparkline(self.curves[name].cells, width, limits, PLAIN_BLOCKS if self.plain else BLOCKS)
        return Text.assemble((f"{title:<10}", "bright_black"), (drawn, "cyan"), f"  {form.format(self.latest[name])}")


class _Curve:
    """All values so far as fewer than `CELLS` means, each of equally many values."""

    def __init__(self):
        self.cells: list[float] = []
        self.each = 1  # values per cell
        self.waiting: list[float] = []  # values of the next cell

    def add(self, value: float) -> None:
        if not math.isfinite(value):
            return
        self.waiting.append(value)
        if len(self.waiting) < self.each:
            return
        self.cells.append(fmean(self.waiting))
        self.waiting.clear()
        if len(self.cells) == CELLS:
            self.cells = [fmean(pair) for pair in zip(self.cells[::2], self.cells[1::2], strict=True)]
            self.each *= 2


def _sparkline(values: list[float], width: int, limits: tuple[float, float] | None = None, blocks: str = BLOCKS) -> str:
    """One block per value; if `width` is too small, one per second, third, ... value."""
    values = values[:: -(-len(values) // width) or 1]
    low, high = limits or (min(values, default=0.0), max(values, default=0.0))
    steps = [(value - low) / (high - low) if high > low else 0.0 for value in values]
    return "".join(blocks[min(len(blocks) - 1, max(0, int(step * len(blocks))))] for step in steps)


class _Above:
    """A stream that prints above the live view."""

    def __init__(self, console: rich.console.Console):
        self.console = console

    def write(self, text: str) -> None:
        self.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def flush(self) -> None:
        """Nothing to do: `print` flushes."""
