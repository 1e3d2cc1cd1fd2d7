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
from typing import Any

from sparring.config.schema import Config
from sparring.config.section import ConfigError, Section
from sparring.config.text import flatten, read_settings, value_text
from sparring.errors import UserError
from sparring.processes.files import take_lock
from sparring.record.log import LOGGER
from sparring.runs.checkpoint import CheckpointError, checkpoints, find_checkpoint

# these say where and how loudly, not what is trained
FREE_TO_DIFFER = ("resume", "output", "logging.", "rollout.watchdog_s")
# nor do settings of what the phase does not have; a world model is none the worse for another explorer to come
NOT_READ = {
    "teacher": ("policy.", "ppo.", "grpo.", "algorithm", "imitate.", "student.", "adversarial.", "rewards.", "buffer.")
}
# of a file system that knows no locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


def choose_checkpoint(config: Config) -> Path | None:
    """The checkpoint to go on from, or None to start anew. Only looks: what follows may still find a mistake."""
    folder = config.run_folder
    if folder.exists() and not folder.is_dir():
        raise ConfigError([f"output = '{folder}': is a file; give a folder"])
    if (folder / "writer.lock").exists():
        with alone_in(folder):
            pass  # told before anything is built
    if config.resume == "never":
        return None
    found = checkpoints(folder)
    saved = _saved_config(folder)
    # where nothing was saved there is nothing to mix with: a start that failed does not take the folder
    _refuse_other_config(folder, saved if found else {}, config)
    # a run that branched off from a checkpoint goes on by the same command
    if config.resume == "auto" or (found and saved.get("resume") == config.resume):
        return found[-1] if found else None
    checkpoint = find_checkpoint(config.resume)
    _refuse_other_config(checkpoint, _saved_config(checkpoint), config)
    _refuse_to_overtake(folder, checkpoint)
    return checkpoint


def make_room(config: Config) -> None:
    """Move an earlier run aside where this one starts anew, after `choose_checkpoint`. Nothing is ever overwritten."""
    folder = config.run_folder
    if config.resume == "never" and folder.exists():
        with alone_in(folder):
            _move_aside(folder)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make the folder, and write into it while no other process does. However this one ends, it lets go of it."""
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


def open_folder(config: Config) -> None:
    """Make the run folder ready, after `make_room`; to be called while `alone_in` it."""
    if not checkpoints(config.run_folder):
        _start(config.run_folder, config)


def way_on(checkpoint: Path, config: Config) -> str:
    """What to do where this checkpoint, from which a run was to go on, is of no use."""
    anew = "start anew with --resume never (a run in the folder is moved aside)"
    found = checkpoints(checkpoint.parent)
    older = found[: found.index(checkpoint)] if checkpoint in found else []
    if not older:
        return anew
    if checkpoint.parent.resolve() != config.run_folder.resolve():
        return f"branch off from an older one with --resume {older[-1]}, or {anew}"
    return f"remove '{checkpoint}' to go on from '{older[-1]}' with --resume auto, or {anew}"


def differences(saved: dict[str, Any], config: Config) -> list[str]:
    """Keys whose values are not the same, in words; `saved` has dotted keys.

    A setting that did not exist when it was saved is the same where it has its default.
    """
    now = flatten(config.dump())
    return [
        f"{key}: {_shown(saved, key)} in the folder, {_shown(now, key)} now"
        for key in sorted(saved.keys() | now.keys())
        if not key.startswith((*FREE_TO_DIFFER, *NOT_READ.get(config.phase, ())))
        and _shown(saved, key) != _shown(now, key)
        and (key in saved or not _is_default(config, key))
    ]


def _is_default(config: Config, key: str) -> bool:
    section, _, leaf = key.partition(".")
    holder, name = (getattr(config, section), leaf) if leaf else (config, section)
    # None: a key within a setting
    field = type(holder).model_fields.get(name)
    if field is None:
        return False
    value = getattr(holder, name)
    # of a section there are its keys, but for one that has none
    return isinstance(value, Section) or value == field.get_default(call_default_factory=True)


def _shown(values: dict[str, Any], key: str) -> str:
    return value_text(values[key]) if key in values else "not there"


def _saved_config(folder: Path) -> dict[str, Any]:
    """Dotted keys and values of a run folder or checkpoint; nothing where there is none."""
    newest = checkpoints(folder)[-1:]
    file = next((path / "config.yaml" for path in (folder, *newest) if (path / "config.yaml").exists()), None)
    return {setting.key: setting.value for setting in read_settings(file)} if file else {}


def _start(folder: Path, config: Config) -> None:
    # of a run that was stopped before its first checkpoint; they will be written again
    earlier = [folder / name for name in ("episode_metrics.jsonl", "evaluations.jsonl", "timeline.jsonl", "wandb/id")]
    if earlier[0].exists() or (folder / "status.json").exists():
        logging.getLogger(LOGGER).warning(
            "'%s' holds an earlier try that left no checkpoint: starts from the beginning, and writes its numbers anew "
            "(logs and videos stay)",
            folder,
        )
    try:
        for file in earlier:
            file.unlink(missing_ok=True)
        (folder / "config.yaml").write_text(config.to_yaml())
    except OSError as error:
        raise ConfigError([f"output = '{folder}': cannot write there ({error.strerror})"]) from None


def _refuse_other_config(folder: Path, saved: dict[str, Any], config: Config) -> None:
    changed = differences(saved, config) if saved else []
    if changed:
        raise ConfigError(
            [
                f"'{folder}' holds a run with another config:",
                *(f"  {line}" for line in changed),
                "give another folder (--output DIR), start anew here (--resume never; the old run is moved aside), "
                f"or start a new run from its weights (--output DIR pretrained={folder})",
            ]
        )


def _refuse_to_overtake(folder: Path, checkpoint: Path) -> None:
    """Going back to an older checkpoint in the same folder would destroy what came after it."""
    found = [path.resolve() for path in checkpoints(folder)]
    later = found[found.index(checkpoint.resolve()) + 1 :] if checkpoint.resolve() in found else found
    if later:
        raise CheckpointError(
            f"'{folder}' also holds {', '.join(c.name for c in later)}; to branch off from '{checkpoint}', "
            "give a new folder with --output DIR"
        )


def _move_aside(folder: Path) -> None:
    if not (folder / "config.yaml").exists() and not checkpoints(folder):
        return
    number = 1
    while (old := folder.with_name(f"{folder.name}-old-{number}")).exists():
        number += 1
    folder.rename(old)
    logging.getLogger(LOGGER).info("moved the earlier run to %s", old)
