"""How a run begins and ends, and that what its folder tells of it is true, also where that goes wrong."""

import errno
import json
import logging
from pathlib import Path

import pytest

from sparring.errors import UserError
from sparring.launch import PATIENCE
from sparring.record.log import LOGGER
from sparring.record.recorder import AFTER_AN_ERROR_S
from sparring.run import Run
from sparring.tree import load_config

SMALL = {
    "env": {"name": "gym:CartPole-v1"},
    "policy": {"hidden": [8]},
    "rollout": {"n_envs": 2, "steps": 16, "render_episodes": 0},
    "ppo": {"mini_batch_size": 16, "ppo_epochs": 1},
    "training": {"iterations": 2},
    "evaluation": {"episodes": 2},
    "logging": {"console_level": "ERROR"},
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def logging_as_it_was():
    logger = logging.getLogger(LOGGER)
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers.clear()
    yield
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = before
    logger.manager._clear_cache()


def config_in(folder, **more):
    return load_config(SMALL | {"output": str(folder)} | more)


def status_in(folder) -> dict:
    return json.loads((folder / "status.json").read_text())


def fail_with(error):
    def fail(*_):
        raise error

    return fail


def test_a_full_disk_does_not_hide_what_ended_a_run(tmp_path, monkeypatch):
    run = Run(config_in(tmp_path))
    write = Path.write_text

    def full(path, text, *rest):
        if path.name == "status.partial":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, text, *rest)

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(run.phase, "step", fail_with(ZeroDivisionError("what ended it")))
    with pytest.raises(ZeroDivisionError, match="what ended it"):
        run.run()
    said = (tmp_path / "train.log").read_text()
    assert said.count("status.json' (No space left on device); it is out of date") == 1
