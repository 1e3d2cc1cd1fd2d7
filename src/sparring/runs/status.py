"""status.json: the state of a run, for those who look at its folder from outside.

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
from typing import Any

import torch
from torch import nn

from sparring import __version__
from sparring.config.schema import Config
from sparring.errors import UserError
from sparring.phases.phase import Phase, Progress
from sparring.record.log import LOGGER
from sparring.runs.listing import read_json

log = logging.getLogger(LOGGER)

# between two writes of progress alone
_SECONDS = 1.0


class Status:
    """Written at once as a whole, so that nobody reads half of it. Without a folder, not at all.

    `goes_on`: what an earlier start of the run wrote still holds; all of it, where the run was finished by then.
    """

    def __init__(self, folder: Path | None, phase: str, task: str, system: dict, goes_on: bool = False):
        self.file = folder / "status.json" if folder else None
        earlier = read_json(self.file) if self.file and goes_on else {}
        fraction = (earlier.get("progress") or {}).get("fraction", 0.0)
        self.was_finished = earlier.get("state") == "finished" and fraction >= 1
        self.system, self._process = system, {"pid": os.getpid(), "host": socket.gethostname(), "system": system}
        self.content = {"state": "running", "why": None, **self._process}
        self.content |= {"phase": phase, "task": task, "started": time.time(), "updated": None, "ended": None}
        self.content |= {"seconds": earlier.get("seconds") or 0.0, "progress": None, "best": None, "last": None}
        self.content |= {name: earlier[name] for name in ("started", "progress", "best", "last") if earlier.get(name)}
        self.content |= earlier if self.was_finished else {}
        # since when seconds count, while it trains
        self._since: float | None = None
        # state and why, as it ended last in this process
        self.ended: tuple[str, str | None] | None = None
        self._began = False
        self._written = -float("inf")
        self._warned = False

    @classmethod
    def of(cls, config: Config, folder: Path | None, phase: Phase, device: torch.device, goes_on: bool) -> "Status":
        tasks = getattr(config.env, "task", ())
        task = tasks if isinstance(tasks, str) else ", ".join(tasks) or config.env.name
        # where weights are averaged, the model is the average, which does not learn
        learns = getattr(phase, "policy", phase.model)
        return cls(folder, config.phase, task, _system(device, learns), goes_on)

    def begin(self, progress: Progress, fraction: float, evaluations: list[dict], trains: bool = True) -> None:
        """`evaluations`: lines of evaluations.jsonl so far."""
        # one that was finished may be made to go further
        self.was_finished = self.was_finished and fraction >= 1
        if self.was_finished:
            return
        self._began, self._since = True, time.monotonic() if trains else None
        self.content |= {"state": "running", "why": None, "ended": None, **self._process}
        self.progress(progress, fraction)
        self.evaluated(evaluations)

    def progress(self, progress: Progress, fraction: float) -> None:
        self.content["progress"] = asdict(progress) | {"fraction": fraction}
        if time.monotonic() - self._written >= _SECONDS:
            self._write()

    def evaluated(self, evaluations: list[dict]) -> None:
        names = {"success_rate": "success_rate", "low": "success_low", "high": "success_high", "episodes": "episodes"}
        rates: list[dict[str, Any]] = [
            {ours: line.get(f"eval/{theirs}") for ours, theirs in names.items()} | {"update": line["update"]}
            for line in evaluations
            if line.get("eval/success_rate") is not None
        ]
        self.content["best"] = max(rates, key=lambda rate: rate["success_rate"], default=None)
        self.content["last"] = rates[-1] if rates else None
        self._write()

    def end(self, progress: Progress, fraction: float, state: str, why: str | None = None) -> None:
        self.ended = state, why
        if self.was_finished:
            return
        self.content |= {"state": state, "why": why, "ended": time.time()}
        # a start that failed is as far as it was before
        if self._began:
            self.content["progress"] = asdict(progress) | {"fraction": fraction}
        self._write()
        self._since = None

    def fail(self, progress: Progress, fraction: float, error: BaseException) -> None:
        """Ended by an exception: its first line, without the last output of a process, which follows that line."""
        line = next(iter(str(error).splitlines()), "").removesuffix("; its last words:")
        why = line if isinstance(error, UserError) else f"{type(error).__name__}: {line}".removesuffix(": ")
        self.end(progress, fraction, "interrupted" if isinstance(error, KeyboardInterrupt) else "crashed", why)

    def describe_system(self) -> str:
        """The first line of a log."""
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
        self.content["updated"] = time.time()
        if self._since is not None:
            now = time.monotonic()
            self.content["seconds"] += now - self._since
            self._since = now
        partial = self.file.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(self.content, indent=2) + "\n")
            partial.replace(self.file)
        except OSError as error:
            # a full disk: training, or what ended it, matters more than its status
            if not self._warned:
                log.warning("cannot write '%s' (%s); it is out of date", self.file, error.strerror)
            self._warned = True
        self._written = time.monotonic()


def _system(device: torch.device, model: nn.Module) -> dict:
    """What a run runs on, what it trains, and how it was started."""
    program, *arguments = sys.argv
    program = "sparring" if Path(program).name == "__main__.py" else Path(program).name
    return {
        "sparring": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "frozen": sum(p.numel() for p in model.parameters() if not p.requires_grad),
        "command": shlex.join([program, *arguments]),
    }
