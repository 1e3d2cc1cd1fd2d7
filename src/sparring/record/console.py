"""What a person sees while it runs: a moving bar on a terminal, a plain line now and then in a pipe."""

import sys
import time


class Console:
    """One line of progress; `quiet` says nothing."""

    def __init__(self, stream=None, quiet: bool = False, pipe_seconds: float = 5.0):
        self.stream = stream or sys.stderr
        self.quiet = quiet
        self.terminal = self.stream.isatty()
        self.pipe_seconds = pipe_seconds
        self.last_line = -float("inf")
        self.bar_shown = False
        # (fraction, steps, time) of the first call: speed and time left are means since then
        self.first: tuple[float, int, float] | None = None

    def progress(self, fraction: float, steps: int, words: str, unit: str = "steps") -> None:
        """How far (0..1), how fast, how long still, and a few words of how it goes."""
        if self.quiet:
            return
        now = time.monotonic()
        self.first = self.first or (fraction, steps, now)
        done, made, seconds = fraction - self.first[0], steps - self.first[1], now - self.first[2]
        left = seconds * (1 - fraction) / done if done > 0 else float("inf")
        speed = f"{made / seconds:,.{0 if unit == 'steps' else 2}f} {unit}/s" if made else "starting"
        text = f"{fraction:4.0%}  {steps:,} {unit}  {speed}  {clock(left)} left  {words}"
        if self.terminal:
            filled = round(20 * fraction)
            self.stream.write(f"\r\x1b[K[{'#' * filled}{'.' * (20 - filled)}] {text}")
            self.bar_shown = True
        elif now - self.last_line >= self.pipe_seconds or fraction >= 1:
            self.stream.write(text + "\n")
            self.last_line = now
        self.stream.flush()

    def end(self) -> None:
        """Leave the bar's line, so that what follows starts on its own."""
        if self.bar_shown:
            self.stream.write("\n")
            self.stream.flush()
            self.bar_shown = False


def clock(seconds: float) -> str:
    if seconds == float("inf"):
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
