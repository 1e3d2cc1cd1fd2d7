"""How a run begins and ends, and that what its folder tells of it is true, also where that goes wrong."""

import errno
import json
from pathlib import Path

import pytest

from sparring.errors import UserError
from sparring.launch import PATIENCE
from sparring.record.recorder import AFTER_AN_ERROR_S
from sparring.record.status import why
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


def test_a_start_that_fails_in_its_folder_has_crashed(tmp_path, monkeypatch):
    monkeypatch.setattr("sparring.run.make_sinks", fail_with(UserError("Weights & Biases did not start\nlog in")))
    with pytest.raises(UserError, match="did not start"):
        Run(config_in(tmp_path))
    told = status_in(tmp_path)
    assert (told["state"], told["why"]) == ("crashed", "Weights & Biases did not start") and told["ended"]
    assert "ended by an exception" in (tmp_path / "train.log").read_text()
    # it does not take the folder
    monkeypatch.undo()
    assert Run(config_in(tmp_path)).run() and status_in(tmp_path)["state"] == "finished"


@pytest.mark.parametrize("error", [None, ZeroDivisionError("gone")])
def test_how_it_ended_is_told_before_videos_are_waited_for(tmp_path, monkeypatch, error):
    run, waited, closed = Run(config_in(tmp_path)), [], []
    finish = lambda patience: waited.append((patience, status_in(tmp_path)["state"], list(closed)))  # noqa: E731
    monkeypatch.setattr(run.recorder.films, "finish", finish)
    monkeypatch.setattr(run.recorder, "close", lambda failed=False: closed.append(failed))
    if error:
        monkeypatch.setattr(run.phase, "step", fail_with(error))
        with pytest.raises(ZeroDivisionError):
            run.run()
    else:
        run.run()
    # of an error, W&B is told after the videos that are there; who launched this waits no longer than PATIENCE
    assert waited == [(2.0, "crashed", []) if error else (120.0, "finished", [])]
    assert closed == ([True] if error else []) and AFTER_AN_ERROR_S < PATIENCE


def test_why_does_not_announce_what_it_leaves_out():
    assert why(UserError("a worker died; its last words:\n  Segmentation fault")) == "a worker died"


def test_an_evaluation_before_the_end_interrupts_nothing(tmp_path):
    Run(config_in(tmp_path)).evaluate()
    told = status_in(tmp_path)
    assert (told["state"], told["why"], told["progress"]["fraction"]) == ("finished", "not trained", 0.0)


def test_two_runs_of_a_process_keep_their_logs_apart(tmp_path):
    one, two = Run(config_in(tmp_path / "one")), Run(config_in(tmp_path / "two"))
    one.run()
    two.run()
    one.evaluate()
    said = [(tmp_path / name / "train.log").read_text() for name in ("one", "two")]
    assert [text.count("held-out episodes") for text in said] == [1, 0]
    for name in ("one", "two"):
        (file,) = (tmp_path / name / "logs/training").iterdir()
        assert [line.partition("update ")[2][0] for line in file.read_text().splitlines()] == ["1", "2"]
