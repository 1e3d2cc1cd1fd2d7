"""The run folder: start or resume a run in it, never mix two runs; and status.json, the state of the run.

outputs/<phase>_rl/
  config.yaml  manifest.json  status.json  episode_metrics.jsonl  evaluations.jsonl  timeline.jsonl  evaluation.json
  writer.lock  checkpoint-<n>/  samples/*.png  videos/*.mp4  logs/  train.log  tensorboard/  wandb/

Other programs read status.json. `state` is running, finished, interrupted or crashed. If it is `running` and no process
holds writer.lock, the run was killed.
"""

import errno
import logging
import os
import platform
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from sparring import __version__
from sparring.config.schema import Config
from sparring.config.section import ConfigError
from sparring.config.text import saved_settings
from sparring.errors import Diverged, UserError
from sparring.phases.phase import Phase, Progress
from sparring.processes.files import refuse_links_out, take_lock, write_whole
from sparring.processes.manifest import altered, entry, write_manifest
from sparring.processes.rows import Document, RowFile
from sparring.record.log import LOGGER
from sparring.runs.checkpoint import CheckpointError, checkpoints, damage_of, find_checkpoint, newest_whole
from sparring.runs.fits import refuse_other_config
from sparring.runs.listing import read_status

log = logging.getLogger(LOGGER)

ROW_FILES = ("episode_metrics.jsonl", "evaluations.jsonl", "timeline.jsonl")
# minimum time between two writes of progress alone, so that short updates do not write too often
_SECONDS = 0.5
# errors of a file system without locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


class RunFolder:
    """The folder of a run. Starting a run never overwrites another run."""

    def __init__(self, config: Config):
        self.config, self.path = config, config.run_folder

    def choose_checkpoint(self) -> Path | None:
        """The checkpoint to resume from, or None to start from scratch. Writes nothing; later checks may still fail."""
        path, resume = self.path, self.config.resume
        if path.exists() and not path.is_dir():
            raise ConfigError([f"output = '{path}': is a file; give a folder"])
        refuse_links_out(path)
        if (path / "writer.lock").exists():
            with folder_lock(path):
                pass  # a folder in use is refused before anything is built
        if resume == "never":
            return None
        # without a checkpoint no two runs can be mixed: after a failed start any run may use the folder
        if found := checkpoints(path):
            newest = cast(Path, newest_whole(path))
            saved = saved_settings(newest)
            refuse_other_config(path, saved, self.config)
            # the command that branched off from a checkpoint also resumes the new run
            if resume in ("auto", saved.get("resume")):
                return newest
        if resume == "auto":
            return None
        checkpoint = find_checkpoint(resume)
        refuse_other_config(checkpoint, saved_settings(checkpoint), self.config)
        # resuming from an older checkpoint in the same folder would destroy the later ones
        found, chosen = [other.resolve() for other in found], checkpoint.resolve()
        later = found[found.index(chosen) + 1 :] if chosen in found else found
        if later := [other for other in later if not damage_of(other)]:
            advice = f"to branch off from '{checkpoint}', give a new folder with --output DIR"
            raise CheckpointError(f"'{path}' also holds {', '.join(c.name for c in later)}; {advice}")
        return checkpoint

    def make_room(self) -> None:
        """Move an earlier run aside if this one starts from scratch. Call it after `choose_checkpoint`."""
        path = self.path
        if self.config.resume != "never" or not path.exists():
            return
        with folder_lock(path):
            if (path / "config.yaml").exists() or checkpoints(path):
                number = 1
                while (old := path.with_name(f"{path.name}-old-{number}")).exists():
                    number += 1
                path.rename(old)
                log.info("moved the earlier run to %s", old)

    def open(self) -> None:
        """Prepare the folder. Call it after `make_room`, inside `folder_lock`."""
        path = self.path
        # leftovers of interrupted saves and deletions
        for partial in path.glob(".partial-checkpoint-*"):
            shutil.rmtree(partial, ignore_errors=True)
        for partial in path.glob("videos/*.partial"):
            partial.unlink(missing_ok=True)
        if checkpoints(path):
            return
        # files of a run that ended before its first checkpoint; this run writes them again
        earlier = [path / name for name in (*ROW_FILES, "wandb/id")]
        if earlier[0].exists() or (path / "status.json").exists():
            effect = "starts from the beginning and replaces the recorded metrics (logs and videos stay)"
            log.warning("'%s' holds an earlier attempt without a checkpoint: %s", path, effect)
        try:
            for file in earlier:
                file.unlink(missing_ok=True)
            self.write_config(self.config)
        except OSError as error:
            raise ConfigError([f"output = '{path}': cannot write there ({error.strerror})"]) from None

    def keep_config(self, checkpoint: Path, config: Config, trains: bool) -> Config:
        """Write the current limits and free settings of a resumed run to config.yaml; returns the config to use."""
        # the command that branched off from another run must also resume this one
        resume = saved_settings(checkpoint).get("resume", config.resume)
        config = config.model_copy(update={"resume": resume})
        if damaged := altered(self.path, "config.yaml"):
            again = f"written again from {checkpoint.name}"
            log.warning("'%s': %s; %s", self.path, damaged[0], again)
        if damaged or trains:
            self.write_config(config)
        return config

    def write_config(self, config: Config) -> None:
        """Write config.yaml and sign it, so that later commands may import the code that it names."""
        file = self.path / "config.yaml"
        write_whole(file, config.to_yaml())
        write_manifest(self.path, "run", {file.name: entry(file)})

    def keep_batch(self, error: Diverged, rank: int, update: int) -> None:
        """Save the batch of a diverged update for inspection. Each process saves its own."""
        file = self.path / (f"diverged-{rank}.safetensors" if rank else "diverged.safetensors")
        leaves = error.batch.items(include_nested=True, leaves_only=True)
        tensors = {"/".join(key) if isinstance(key, tuple) else key: value for key, value in leaves}
        # cloned, because tensors in a safetensors file must not share memory
        tensors = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
        about = {"update": update, **error.about}
        try:
            save_file(tensors, file, {name: str(value) for name, value in about.items()})
        except (OSError, SafetensorError) as problem:
            log.warning("cannot save the batch of the diverged update in '%s' (%s)", file, problem)
        else:
            log.warning("the batch of the diverged update is saved in '%s' (docs/troubleshooting.md)", file)

    def holds(self, checkpoint: Path) -> bool:
        return checkpoint.parent.resolve() == self.path.resolve()

    def advise(self, checkpoint: Path) -> str:
        """What the user can do if a run cannot resume from this checkpoint."""
        restart = "start from scratch with --resume never (it moves a run in the folder aside)"
        found = checkpoints(checkpoint.parent)
        older = found[: found.index(checkpoint)] if checkpoint in found else []
        if not older:
            return restart
        if not self.holds(checkpoint):
            return f"branch off from an older one with --resume {older[-1]}, or {restart}"
        return f"remove '{checkpoint}' to resume from '{older[-1]}' with --resume auto, or {restart}"


@contextmanager
def folder_lock(folder: Path | None) -> Iterator[None]:
    """Create the folder and hold its lock; the lock ends with the process. None: does nothing."""
    if folder is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder)
    except UserError:
        wait = "wait until it is done, stop it, or give another folder (--output DIR)"
        raise ConfigError([f"'{folder}': another process is training there; {wait}"]) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise ConfigError([f"output = '{folder}': cannot write there ({error.strerror})"]) from None
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


class Status:
    """Writes status.json atomically, so that no reader sees half of it. Without a folder it writes nothing.

    `resumed`: keep what an earlier start of the run wrote; all of it if the run was finished."""

    def __init__(self, folder: Path | None, phase: str, task: str, system: dict, resumed: bool = False):
        self.file = folder / "status.json" if folder else None
        earlier = read_status(folder) if folder and resumed else {}
        if wrong := earlier.get("damaged"):
            log.warning("'%s': %s; the earlier status of the run is lost", folder, wrong)
        fraction = (earlier.get("progress") or {}).get("fraction", 0.0)
        self.was_finished = earlier.get("state") == "finished" and fraction >= 1
        self.system, self._process = system, {"pid": os.getpid(), "host": socket.gethostname(), "system": system}
        self.content: dict[str, Any] = {"state": "running", "why": None, **self._process}
        self.content |= {"phase": phase, "task": task, "started": time.time(), "updated": None, "ended": None}
        self.content |= {"seconds": earlier.get("seconds") or 0.0, "progress": None, "best": None, "last": None}
        self.content |= {name: earlier[name] for name in ("started", "progress", "best", "last") if earlier.get(name)}
        self.content |= earlier if self.was_finished else {}
        # start of the seconds that are not counted yet; None while it does not train
        self._since: float | None = None
        # state and reason of the last end in this process
        self.ended: tuple[str, str | None] | None = None
        self._began = False
        self._written = -float("inf")
        self._warned = False

    @classmethod
    def of(cls, config: Config, folder: Path | None, phase: Phase, device: torch.device, resumed: bool) -> "Status":
        tasks = getattr(config.env, "task", ())
        task = tasks if isinstance(tasks, str) else ", ".join(tasks) or config.env.name
        # with averaged weights, `phase.model` is the average, which has no trainable parameters
        trained = getattr(phase, "policy", phase.model)
        return cls(folder, config.phase, task, _system(device, trained), resumed)

    def begin(self, progress: Progress, fraction: float, evaluations: list[dict], trains: bool = True) -> None:
        """Write the state `running`. `evaluations`: the lines of evaluations.jsonl so far."""
        # a finished run trains further if its limit was raised
        self.was_finished = self.was_finished and fraction >= 1
        if self.was_finished:
            return
        self._began, self._since = True, time.monotonic() if trains else None
        self.content |= {"state": "running", "why": None, "ended": None, **self._process}
        self.progress(progress, fraction)
        self.evaluated(evaluations)

    def progress(self, progress: Progress, fraction: float, at_once: bool = False) -> None:
        self.content["progress"] = asdict(progress) | {"fraction": fraction}
        if at_once or time.monotonic() - self._written >= _SECONDS:
            self._write()

    def evaluated(self, evaluations: list[dict]) -> None:
        names = {"success_rate": "success_rate", "low": "success_low", "high": "success_high", "episodes": "episodes"}
        rates: list[dict[str, Any]] = [
            {name: line.get(f"eval/{metric}") for name, metric in names.items()} | {"update": line["update"]}
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
        # a failed start keeps the progress of the earlier one
        if self._began:
            self.content["progress"] = asdict(progress) | {"fraction": fraction}
        self._write()
        self._since = None

    def fail(self, progress: Progress, fraction: float, error: BaseException) -> None:
        """Write the end by an exception: the first line of its message, without the output of a process below it."""
        line = next(iter(str(error).splitlines()), "").removesuffix("; its last output:")
        why = line if isinstance(error, UserError) else f"{type(error).__name__}: {line}".removesuffix(": ")
        self.end(progress, fraction, "interrupted" if isinstance(error, KeyboardInterrupt) else "crashed", why)

    def describe_system(self) -> str:
        """The first line of a log: versions, platform and numbers of parameters."""
        system = self.system
        gpu = f", {system['gpu']}" if system["gpu"] else ""
        return (
            f"sparring {system['sparring']}, Python {system['python']}, torch {system['torch']}; "
            f"{system['platform']}, {system['cpus']} CPUs{gpu}; "
            f"{system['trainable']:,} trainable parameters, {system['frozen']:,} frozen"
        )

    def _write(self) -> None:
        if self.file is None:
            return
        self.content["updated"] = time.time()
        if self._since is not None:
            now = time.monotonic()
            self.content["seconds"] += now - self._since
            self._since = now
        try:
            # the last row numbers show a reader whether rows are missing at the end of a file
            rows = {name: RowFile(self.file.with_name(name)).last for name in ROW_FILES}
            Document(self.file).write(self.content | {"rows": rows})
        except OSError as error:
            # for example a full disk; training, or the error that ended it, matters more than the status
            if not self._warned:
                log.warning("cannot write '%s' (%s); it is out of date", self.file, error.strerror)
            self._warned = True
        self._written = time.monotonic()


def _system(device: torch.device, model: nn.Module) -> dict:
    """Versions, hardware, numbers of parameters, and the command of the run."""
    program, *arguments = sys.argv
    program = "sparring" if Path(program).name == "__main__.py" else Path(program).name
    system: dict[str, Any] = {"sparring": __version__, "python": platform.python_version()}
    system |= {"torch": str(torch.__version__), "platform": platform.platform(), "cpus": os.cpu_count()}
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trainable
    system |= {"device": str(device), "gpu": gpu, "trainable": trainable, "frozen": frozen}
    return system | {"command": shlex.join([program, *arguments])}
