"""The console: a live view where there is a terminal, lines where there is none."""

import logging
import math
import os
import sys
import time
from statistics import fmean

import rich.console
from rich.console import Group
from rich.live import Live
from rich.text import Text

# ---- The live view of a run on a terminal: a few lines that are drawn again in place, below what is logged.
#
# finetune of reach_d0
# ███████████████░░░░░░░░░░░░░  54%  81,920 steps  9,120 steps/s  0:08 left
# success   ▁▁▂▃▄▅▆▇▇█  82%
# reward    ▁▂▃▃▄▅▆▆▇█  21.4
# loss      policy -0.0131  value 0.412  KL 0.0089


# seconds between two drawings
EVERY = 0.25
# of a curve
CELLS = 40
BLOCKS, PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
# metric -> what it is called, and how it is written; those that a run has, from its beginning on
CURVES = {
    "success_rate": ("success", "{:.0%}"),
    "episode_reward": ("reward", "{:.3g}"),
    "contact_share": ("contact", "{:.0%}"),
    "fresh_acc": ("accuracy", "{:.0%}"),
    "loss": ("loss", "{:.4g}"),
}
# a line each, of those that it has
LINES = {
    "losses": {
        "policy_loss": ("policy", "{:.3g}"),
        "value_loss": ("value", "{:.3g}"),
        "wm_loss": ("world model", "{:.3g}"),
        "entropy": ("entropy", "{:.3g}"),
        "approx_kl": ("KL", "{:.2g}"),
        "clip_fraction": ("clipped", "{:.0%}"),
        "parity": ("parity", "{:.1g}"),
    },
    "seconds": {"collect_seconds": ("collect", "{:.2f}"), "update_seconds": ("update", "{:.2f}")},
    "async": {
        "staleness": ("staleness", "{:.2g}"),
        "queue_depth": ("queue", "{:.2g}"),
        "actor_idle": ("robots idle", "{:.0%}"),
        "learner_idle": ("learner idle", "{:.0%}"),
    },
}
_TERM = "reward/"
# that of log.py, which is not as light as this is
_LOGGER = "sparring"


class View:
    """Opened by the first `show`, and again by one after `close`."""

    def __init__(self, stream, title: str):
        self.stream, self.title = stream, title
        self.console = rich.console.Console(file=stream)
        self.plain = self.console.options.ascii_only
        self.live: Live | None = None
        self.drawn = -float("inf")
        self.curves: dict[str, Curve] = {}
        # the newest there is of each metric: not every update has episodes that ended
        self.latest: dict[str, float] = {}
        self.handlers: list[logging.StreamHandler] = []

    def show(self, fraction: float, pace: str, metrics: dict[str, float], words: str) -> None:
        """`pace`: how far and how fast; `words`: instead of metrics where there are none."""
        self.latest |= metrics
        for name in CURVES.keys() & metrics.keys():
            self.curves.setdefault(name, Curve()).add(metrics[name])
        now = time.monotonic()
        if self.live and now - self.drawn < EVERY and fraction < 1:
            return
        self.drawn = now
        lines = Group(*self.lines(fraction, pace, words))
        if self.live:
            self.live.update(lines, refresh=True)
        else:
            self._open(lines)

    def close(self) -> bool:
        """Take it away; whether it was there."""
        if not self.live:
            return False
        for handler in self.handlers:
            handler.setStream(self.stream)
        self.live.stop()
        self.live = None
        return True

    def lines(self, fraction: float, pace: str, words: str) -> list[Text]:
        bar = max(8, min(40, self.console.width - len(pace) - 8))
        filled = int(bar * fraction)
        full, empty = "#." if self.plain else "█░"
        first = [(full * filled, "green"), (empty * (bar - filled), "bright_black"), f" {fraction:4.0%}  {pace}"]
        shown = [Text(self.title, "bold")] if self.title else []
        shown += [Text.assemble(*first)]
        shown += [self._curve(name) for name in self._chosen()]
        terms = {name: (name.removeprefix(_TERM), "{:.3g}") for name in self.latest if _is_term(name)}
        for title, names in ({"paid for": terms} | LINES).items():
            told = self._told(names)
            shown += [Text.assemble((f"{title:<10}", "bright_black"), told)] if told else []
        shown += [Text(words)] if not self.latest else []
        for text in shown:
            text.no_wrap, text.overflow = True, "ellipsis"
        return shown

    def _told(self, names: dict[str, tuple[str, str]]) -> str:
        had = {name: how for name, how in names.items() if name in self.latest}
        return "  ".join(f"{called} {form.format(self.latest[name])}" for name, (called, form) in had.items())

    def _chosen(self) -> list[str]:
        """A loss is looked at where nothing better tells how it goes."""
        better = [name for name in CURVES if name in self.curves and name != "loss"]
        return better or [name for name in CURVES if name in self.curves]

    def _curve(self, name: str) -> Text:
        title, form = CURVES[name]
        # of a share, the whole height is 100 %
        limits = (0.0, 1.0) if "%" in form else None
        width = max(8, min(CELLS, self.console.width - 20))
        drawn = sparkline(self.curves[name].cells, width, limits, PLAIN_BLOCKS if self.plain else BLOCKS)
        return Text.assemble((f"{title:<10}", "bright_black"), (drawn, "cyan"), f"  {form.format(self.latest[name])}")

    def _open(self, lines: Group) -> None:
        # what is printed to a pipe goes on there
        self.live = Live(
            lines, console=self.console, auto_refresh=False, transient=True, redirect_stdout=sys.stdout.isatty()
        )
        self.live.start(refresh=True)
        # messages go above it, whole: their handlers hold on to the stream they were made with
        found = logging.getLogger(_LOGGER).handlers
        self.handlers = [h for h in found if isinstance(h, logging.StreamHandler) and h.stream is self.stream]
        for handler in self.handlers:
            handler.setStream(_Above(self.console))


class Curve:
    """All values so far as at most `CELLS` means, each of as many values."""

    def __init__(self):
        self.cells: list[float] = []
        self.each = 1
        self.waiting: list[float] = []

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


def sparkline(values: list[float], width: int, limits: tuple[float, float] | None = None, blocks: str = BLOCKS) -> str:
    """A block for each value, or for every second, third... where there are more than fit."""
    values = values[:: -(-len(values) // width) or 1]
    low, high = limits or (min(values, default=0.0), max(values, default=0.0))
    steps = [(value - low) / (high - low) if high > low else 0.0 for value in values]
    return "".join(blocks[min(len(blocks) - 1, max(0, int(step * len(blocks))))] for step in steps)


class _Above:
    """What a handler writes to while the view is open."""

    def __init__(self, console: rich.console.Console):
        self.console = console

    def write(self, text: str) -> None:
        self.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def flush(self) -> None:
        """Printed is shown."""


def _is_term(name: str) -> bool:
    return name.startswith(_TERM) and not name.endswith("_normalized")


# ---- What a person sees while it runs: a view that is drawn again in place on a terminal, plain lines in a pipe.


class Console:
    """How far it is and how it goes; `quiet` says nothing."""

    def __init__(self, stream=None, quiet: bool = False, pipe_seconds: float = 5.0, title: str = ""):
        self.stream = stream or sys.stderr
        self.quiet = quiet
        self.pipe_seconds = pipe_seconds
        self.last_line = -float("inf")
        self.view = None
        if self.stream.isatty() and os.environ.get("TERM") != "dumb" and not quiet:
            # rich is for terminals only

            self.view = View(self.stream, title)
        # what the view said last, in a line
        self.text = ""
        # (fraction, steps, time) of the first call: speed and time left are means since then
        self.first: tuple[float, int, float] | None = None

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *error) -> None:
        self.end()

    def progress(
        self, fraction: float, steps: int, words: str, unit: str = "steps", metrics: dict[str, float] | None = None
    ) -> None:
        """How far (0..1), how fast, how long still, and a few words of how it goes; a view shows `metrics` instead."""
        if self.quiet:
            return
        now = time.monotonic()
        self.first = self.first or (fraction, steps, now)
        done, made, seconds = fraction - self.first[0], steps - self.first[1], now - self.first[2]
        left = seconds * (1 - fraction) / done if done > 0 else float("inf")
        speed = f"{made / seconds:,.{0 if unit == 'steps' else 2}f} {unit}/s" if made else "starting"
        pace = f"{steps:,} {unit}  {speed}  {clock(left)} left"
        self.text = f"{fraction:4.0%}  {pace}  {words}"
        if self.view:
            self.view.show(fraction, pace, metrics or {}, words)
        elif now - self.last_line >= self.pipe_seconds or fraction >= 1:
            self.stream.write(self.text + "\n")
            self.stream.flush()
            self.last_line = now

    def end(self) -> None:
        """Take the view away; what it said last stays as a line."""
        if self.view and self.view.close():
            self.stream.write(self.text + "\n")
            self.stream.flush()


def clock(seconds: float) -> str:
    if seconds == float("inf"):
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
