"""What a person sees while it runs: a view that is drawn again in place on a terminal, plain lines in a pipe."""

import os
import sys
import time


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
            from sparring.record.view import View

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
