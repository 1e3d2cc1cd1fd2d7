"""The run folder: starting in it, going on in it, and never mixing two runs.

outputs/<phase>_rl/
  config.yaml  episode_metrics.jsonl  train.log  evaluation.json
  checkpoint-<n>/  samples/*.png  videos/*.mp4
"""

import logging
from pathlib import Path

import yaml

from sparring.checkpoint import CheckpointError, checkpoints, find_checkpoint
from sparring.config import ConfigError
from sparring.config_text import flatten
from sparring.record.log import LOGGER
from sparring.tree import Config

# these say where and how loudly, not what is trained
FREE_TO_DIFFER = ("resume", "output", "logging.")


def open_folder(config: Config) -> Path | None:
    """Make the run folder ready; the checkpoint to go on from, or None to start anew. Nothing is ever overwritten."""
    folder = config.run_folder
    if folder.exists() and not folder.is_dir():
        raise ConfigError([f"output = '{folder}': is a file; give a folder"])
    if config.resume == "never":
        _move_aside(folder)
        return _start(folder, config)
    if config.resume == "auto":
        _refuse_other_config(folder / "config.yaml", config)
        found = checkpoints(folder)
        return found[-1] if found else _start(folder, config)
    checkpoint = find_checkpoint(config.resume)
    _refuse_other_config(checkpoint / "config.yaml", config)
    _refuse_to_overtake(folder, checkpoint)
    _start(folder, config)
    return checkpoint


def differences(saved: dict, config: Config) -> list[str]:
    """Keys whose values are not the same, in words."""
    old, new = flatten(saved), flatten(config.dump())
    nothing = object()
    return [
        f"{key}: {old.get(key, 'not there')!r} in the folder, {new.get(key, 'not there')!r} now"
        for key in sorted(old.keys() | new.keys())
        if not key.startswith(FREE_TO_DIFFER) and old.get(key, nothing) != new.get(key, nothing)
    ]


def _start(folder: Path, config: Config) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(config.to_yaml())
    except OSError as error:
        raise ConfigError([f"output = '{folder}': cannot write there ({error.strerror})"]) from None
    return None


def _refuse_other_config(file: Path, config: Config) -> None:
    if not file.exists():
        return
    changed = differences(yaml.safe_load(file.read_text()) or {}, config)
    if changed:
        raise ConfigError(
            [
                f"'{file.parent}' holds a run with another config:",
                *(f"  {line}" for line in changed),
                "give another folder (--output DIR), start anew here (--resume never; the old run is moved aside), "
                f"or start a new run from its weights (--output DIR pretrained={file.parent})",
            ]
        )


def _refuse_to_overtake(folder: Path, checkpoint: Path) -> None:
    """Going back to an older checkpoint in the same folder would destroy what came after it."""
    later = [c for c in checkpoints(folder) if c.resolve() != checkpoint.resolve()]
    if later:
        raise CheckpointError(
            f"'{folder}' also holds {', '.join(c.name for c in later)}; to branch off from '{checkpoint}', "
            "give a new folder with --output DIR"
        )


def _move_aside(folder: Path) -> None:
    if not (folder / "config.yaml").exists():
        return
    number = 1
    while (old := folder.with_name(f"{folder.name}-old-{number}")).exists():
        number += 1
    folder.rename(old)
    logging.getLogger(LOGGER).info("moved the earlier run to %s", old)
