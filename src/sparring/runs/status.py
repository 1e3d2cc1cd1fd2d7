"""status.json: how a run fares, for those who look at its folder from outside.

`state` is running, finished, interrupted or crashed. One that says `running` while nobody holds writer.lock was killed.
"""

import json
import logging
import os
import platform
import shlex
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from sparring import __version__
from sparring.errors import UserError
from sparring.phases.phase import Phase, Progress
from sparring.record.log import LOGGER
from sparring.runs.listing import read_json, seconds_of

log = logging.getLogger(LOGGER)

# between two writes of no more than progress
SECONDS = 1.0


class Ended(NamedTuple):
    """How: finished, interrupted or crashed."""

    state: str
    why: str | None = None


class Status:
    """Written at once as a whole, so that nobody reads half of it. Without a folder, not at all.

    `goes_on`: what it told when it was started before still holds. Of one that was finished by then, all of it.
    """

    def __init__(self, folder: Path | None, phase: str, task: str, system: dict, goes_on: bool = False):
        self.file = folder / "status.json" if folder else None
        earlier = read_json(self.file) if self.file and goes_on else {}
        self.was_finished = _is_finished(earlier)
        self.system, self._process = system, {"pid": os.getpid(), "host": socket.gethostname(), "system": system}
        self.told = {"state": "running", "why": None, **self._process}
        self.told |= {"phase": phase, "task": task, "started": time.time(), "updated": None, "ended": None}
        self.told |= {"seconds": seconds_of(earlier) or 0.0, "progress": None, "best": None, "last": None}
        self.told |= {name: earlier[name] for name in ("started", "progress", "best", "last") if earlier.get(name)}
        self.told |= earlier if self.was_finished else {}
        # since when its seconds count, while it trains
        self._since: float | None = None
        # the last time, of this process
        self.ended: Ended | None = None
        self._began = False
        self._written = -float("inf")
        self._warned = False

    def begin(self, progress: Progress, fraction: float, evaluations: list[dict], trains: bool = True) -> None:
        """`evaluations`: lines of evaluations.jsonl so far."""
        # one that was finished may be made to go further
        self.was_finished = self.was_finished and fraction >= 1
        if self.was_finished:
            return
        self._began, self._since = True, time.monotonic() if trains else None
        self.told |= {"state": "running", "why": None, "ended": None, **self._process}
        self.progress(progress, fraction)
        self.evaluated(evaluations)

    def progress(self, progress: Progress, fraction: float) -> None:
        self.told["progress"] = asdict(progress) | {"fraction": fraction}
        if time.monotonic() - self._written >= SECONDS:
            self._write()

    def evaluated(self, evaluations: list[dict]) -> None:
        rates = [rate for rate in map(_rate, evaluations) if rate["success_rate"] is not None]
        self.told["best"] = max(rates, key=lambda rate: rate["success_rate"], default=None)
        self.told["last"] = rates[-1] if rates else None
        self._write()

    def end(self, progress: Progress, fraction: float, ended: Ended) -> None:
        self.ended = ended
        if self.was_finished:
            return
        self.told |= ended._asdict() | {"ended": time.time()}
        # a start that failed is as far as it was before
        if self._began:
            self.told["progress"] = asdict(progress) | {"fraction": fraction}
        self._write()
        self._since = None

    def system_in_words(self) -> str:
        """The beginning of a log."""
        system = self.system
        gpu = f", {system['gpu']}" if system["gpu"] else ""
        return (
            f"sparring {system['sparring']}, Python {system['python']}, torch {system['torch']}; "
            f"{system['platform']}, {system['cpus']} CPUs{gpu}; "
            f"{system['trainable']:,} parameters learn, {system['frozen']:,} are frozen"
        )

    def _write(self) -> None:
        if self.file is None:
            return
        self.told["updated"] = time.time()
        if self._since is not None:
            now = time.monotonic()
            self.told["seconds"] += now - self._since
            self._since = now
        partial = self.file.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(self.told, indent=2) + "\n")
            partial.replace(self.file)
        except OSError as error:
            # a full disk: training, or what ended it, matters more than what is told of it
            if not self._warned:
                log.warning("cannot write '%s' (%s); it is out of date", self.file, error.strerror)
            self._warned = True
        self._written = time.monotonic()


def status_of(config, folder: Path | None, phase: Phase, device: torch.device, goes_on: bool = False) -> Status:
    tasks = getattr(config.env, "task", ())
    task = tasks if isinstance(tasks, str) else ", ".join(tasks) or config.env.name
    # of averaged weights it is not they that learn
    learns = getattr(phase, "policy", phase.model)
    return Status(folder, config.phase, task, _system(device, learns), goes_on)


def _is_finished(told: dict) -> bool:
    return told.get("state") == "finished" and (told.get("progress") or {}).get("fraction", 0.0) >= 1


def _rate(line: dict) -> dict:
    names = {"success_rate": "success_rate", "low": "success_low", "high": "success_high", "episodes": "episodes"}
    return {ours: line.get(f"eval/{theirs}") for ours, theirs in names.items()} | {"update": line["update"]}


def _system(device: torch.device, model: nn.Module) -> dict:
    """What a run runs on, what it trains, and how it was started."""
    sizes = {
        learns: sum(p.numel() for p in model.parameters() if p.requires_grad == learns) for learns in (True, False)
    }
    program, *words = sys.argv
    program = "sparring" if Path(program).name == "__main__.py" else Path(program).name
    return {
        "sparring": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "trainable": sizes[True],
        "frozen": sizes[False],
        "command": shlex.join([program, *words]),
    }


def why(error: BaseException) -> str:
    """An exception in a line, without the last words of a process, which follow in lines of their own."""
    line = next(iter(str(error).splitlines()), "").removesuffix("; its last words:")
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}".removesuffix(": ")
