"""The run folder: starting in it, going on in it, and never mixing two runs.

outputs/<phase>_rl/
  config.yaml  status.json  episode_metrics.jsonl  evaluations.jsonl  timeline.jsonl  evaluation.json  writer.lock
  checkpoint-<n>/  samples/*.png  videos/*.mp4  logs/  train.log  tensorboard/  wandb/
"""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparring.config.schema import Config
from sparring.config.section import ConfigError
from sparring.errors import UserError
from sparring.processes.files import take_lock
from sparring.record.log import LOGGER
from sparring.runs.checkpoint import CheckpointError, checkpoints, find_checkpoint
from sparring.runs.fits import refuse_other_config, saved_settings

log = logging.getLogger(LOGGER)

# a file system without locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


class RunFolder:
    """The folder of a run. Nothing in it is ever overwritten."""

    def __init__(self, config: Config):
        self.config, self.path = config, config.run_folder

    def choose_checkpoint(self) -> Path | None:
        """The checkpoint to go on from, or None to start anew. Writes nothing: a mistake may still be found later."""
        path, resume = self.path, self.config.resume
        if path.exists() and not path.is_dir():
            raise ConfigError([f"output = '{path}': is a file; give a folder"])
        if (path / "writer.lock").exists():
            with alone_in(path):
                pass  # refused before anything is built
        if resume == "never":
            return None
        found = checkpoints(path)
        saved = saved_settings(path) or (saved_settings(found[-1]) if found else {})
        # where nothing was saved there is nothing to mix with: a start that failed does not take the folder
        refuse_other_config(path, saved if found else {}, self.config)
        # a run that branched off from a checkpoint goes on by the same command
        if resume == "auto" or (found and saved.get("resume") == resume):
            return found[-1] if found else None
        checkpoint = find_checkpoint(resume)
        refuse_other_config(checkpoint, saved_settings(checkpoint), self.config)
        # going back to an older checkpoint in the same folder would destroy what came after it
        found, chosen = [other.resolve() for other in found], checkpoint.resolve()
        if later := found[found.index(chosen) + 1 :] if chosen in found else found:
            raise CheckpointError(
                f"'{path}' also holds {', '.join(c.name for c in later)}; to branch off from '{checkpoint}', "
                "give a new folder with --output DIR"
            )
        return checkpoint

    def make_room(self) -> None:
        """Move an earlier run aside where this one starts anew, after `choose_checkpoint`."""
        path = self.path
        if self.config.resume != "never" or not path.exists():
            return
        with alone_in(path):
            if (path / "config.yaml").exists() or checkpoints(path):
                number = 1
                while (old := path.with_name(f"{path.name}-old-{number}")).exists():
                    number += 1
                path.rename(old)
                log.info("moved the earlier run to %s", old)

    def open(self) -> None:
        """Make it ready, after `make_room`; to be called while `alone_in` it."""
        path = self.path
        if checkpoints(path):
            return
        # of a run that was stopped before its first checkpoint; they will be written again
        earlier = [path / name for name in ("episode_metrics.jsonl", "evaluations.jsonl", "timeline.jsonl", "wandb/id")]
        if earlier[0].exists() or (path / "status.json").exists():
            log.warning(
                "'%s' holds an earlier try that left no checkpoint: starts from the beginning, and writes its numbers "
                "anew (logs and videos stay)",
                path,
            )
        try:
            for file in earlier:
                file.unlink(missing_ok=True)
            (path / "config.yaml").write_text(self.config.to_yaml())
        except OSError as error:
            raise ConfigError([f"output = '{path}': cannot write there ({error.strerror})"]) from None

    def holds(self, checkpoint: Path) -> bool:
        return checkpoint.parent.resolve() == self.path.resolve()

    def advise(self, checkpoint: Path) -> str:
        """What to do where a run cannot go on from this checkpoint."""
        anew = "start anew with --resume never (a run in the folder is moved aside)"
        found = checkpoints(checkpoint.parent)
        older = found[: found.index(checkpoint)] if checkpoint in found else []
        if not older:
            return anew
        if not self.holds(checkpoint):
            return f"branch off from an older one with --resume {older[-1]}, or {anew}"
        return f"remove '{checkpoint}' to go on from '{older[-1]}' with --resume auto, or {anew}"


@contextmanager
def alone_in(folder: Path | None) -> Iterator[None]:
    """Make the folder, and hold its lock while writing into it; the lock ends with the process. None: does nothing."""
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
