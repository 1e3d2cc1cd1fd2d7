"""How a run begins and ends, and that what its folder tells of it is true, also where that goes wrong."""

import errno
import json
import os
import shutil
import signal
import socket
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_runs import config_in, status_in

from sparring.errors import UserError
from sparring.phases.phase import Progress
from sparring.processes.launch import GRACE_S
from sparring.record.recorder import AFTER_AN_ERROR_S
from sparring.runs.checkpoint import CheckpointError, checkpoints
from sparring.runs.folder import Status
from sparring.runs.run import Run


def fail_with(error):
    def fail(*_):
        raise error

    return fail


def test_a_run_whose_env_cannot_draw_says_so_once(tmp_path):
    rollout = {"n_envs": 2, "steps": 16, "render_episodes": 1}
    evaluation = {"episodes": 2, "every": 1}
    run = Run(config_in(tmp_path, env={"name": "gym_doubles:HasNoOpenGL"}, rollout=rollout, evaluation=evaluation))
    run.run()
    # two updates, an evaluation after each; the first one is told of before it takes its time
    assert (run.folder / "train.log").read_text().count("evaluating on 2 held-out episodes") == 1
    assert len((tmp_path / "evaluations.jsonl").read_text().splitlines()) == 2
    assert (run.folder / "train.log").read_text().count("no video: MuJoCo cannot draw gym_doubles:HasNoOpenGL") == 1


def test_a_full_disk_does_not_hide_what_ended_a_run(tmp_path, monkeypatch):
    run = Run(config_in(tmp_path))
    full = fail_with(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("sparring.processes.rows.write_whole", full)
    monkeypatch.setattr(run.phase, "step", fail_with(ZeroDivisionError("what ended it")))
    with pytest.raises(ZeroDivisionError, match="what ended it"):
        run.run()
    said = (tmp_path / "train.log").read_text()
    assert said.count("status.json' (No space left on device); it is out of date") == 1


def test_a_start_that_fails_in_its_folder_has_crashed(tmp_path, monkeypatch):
    monkeypatch.setattr("sparring.runs.run.make_sinks", fail_with(UserError("Weights & Biases did not start\nlog in")))
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
    monkeypatch.setattr(run.recorder.videos, "finish", finish)
    monkeypatch.setattr(run.recorder, "close", lambda failed=False: closed.append(failed))
    if error:
        monkeypatch.setattr(run.phase, "step", fail_with(error))
        with pytest.raises(ZeroDivisionError):
            run.run()
    else:
        run.run()
    # of an error, W&B is told after the videos that are there; who launched this waits no longer than GRACE_S
    assert waited == [(2.0, "crashed", []) if error else (120.0, "finished", [])]
    assert closed == ([True] if error else []) and AFTER_AN_ERROR_S < GRACE_S


def test_why_does_not_announce_what_it_leaves_out():
    status = Status(None, "finetune", "reach_d0", {})
    status.fail(Progress(), 0.5, UserError("a worker died; its last output:\n  Segmentation fault"))
    assert status.ended == ("crashed", "a worker died")


def test_an_evaluation_before_the_end_interrupts_nothing(tmp_path):
    Run(config_in(tmp_path)).evaluate()
    told = status_in(tmp_path)
    assert (told["state"], told["why"], told["progress"]["fraction"]) == ("finished", "not trained", 0.0)


def test_stopped_after_its_last_update_it_is_only_to_be_evaluated(tmp_path, monkeypatch):
    run = Run(config_in(tmp_path))
    step = run.phase.step

    def step_and_stop(fraction):
        metrics = step(fraction)
        if run.fraction >= 1:
            signal.raise_signal(signal.SIGTERM)
        return metrics

    monkeypatch.setattr(run.phase, "step", step_and_stop)
    assert not run.run() and status_in(tmp_path)["state"] == "finished"
    assert "stopped after 2 updates; saved. The same command evaluates it." in (tmp_path / "train.log").read_text()


def test_more_threads_than_cores_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr("sparring.runs.run.usable_cores", lambda: 2)
    config = config_in(tmp_path)
    Run(config.model_copy(update={"threads": 2})).announce()
    said = tmp_path / "train.log"
    assert "threads=" not in said.read_text()
    Run(config.model_copy(update={"threads": 3})).announce()
    assert "threads=3 on 2 cores: " in said.read_text()


def test_several_processes_without_a_gpu_are_warned_of(tmp_path, monkeypatch):
    said = tmp_path / "train.log"
    run = Run(config_in(tmp_path))
    run.announce()
    monkeypatch.setattr(run.distributed, "world_size", 4)
    monkeypatch.setattr(run.distributed, "requested", "cpu")
    run.announce()
    assert "--gpus" not in said.read_text()
    monkeypatch.setattr(run.distributed, "requested", "auto")
    run.announce()
    assert "--gpus 4, but no GPU is visible: 4 processes share the CPU" in said.read_text()


def test_two_runs_of_a_process_keep_their_logs_apart(tmp_path):
    one, two = Run(config_in(tmp_path / "one")), Run(config_in(tmp_path / "two"))
    one.run()
    two.run()
    one.evaluate()
    said = [(tmp_path / name / "train.log").read_text() for name in ("one", "two")]
    assert [text.count("held-out episodes:") for text in said] == [1, 0]
    for name in ("one", "two"):
        (file,) = (tmp_path / name / "logs/training").iterdir()
        assert [line.partition("update ")[2][0] for line in file.read_text().splitlines()] == ["1", "2"]


# ---- several starts


def stop_after(updates: int, run: Run) -> None:
    """As by Ctrl-C."""
    step = run.phase.step

    def step_and_ask(fraction):
        metrics = step(fraction)
        if run.phase.progress.updates == updates:
            os.kill(os.getpid(), signal.SIGINT)
        return metrics

    run.phase.step = step_and_ask
    assert not run.run()


@pytest.fixture
def numbered_logs(monkeypatch):
    """By starts, which may be within a second."""
    numbers = count()
    clock = SimpleNamespace(strftime=lambda _: f"start_{next(numbers)}")
    monkeypatch.setattr("sparring.record.log.time", clock)


def lines_in(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]


def test_time_is_that_of_all_starts(tmp_path):
    stop_after(1, Run(config_in(tmp_path)))
    told = status_in(tmp_path)
    assert 0 < told["seconds"] < 60
    # as if it had been so long, and then left alone
    (tmp_path / "status.json").write_text(json.dumps(told | {"seconds": 1000.0, "started": told["started"] - 9000}))
    assert Run(config_in(tmp_path)).run()
    now = status_in(tmp_path)
    assert now["state"] == "finished" and 1000 < now["seconds"] < 1060
    assert now["started"] == told["started"] - 9000 and now["ended"] > told["ended"]


def test_a_finished_run_that_is_started_again_stays_what_it_was(tmp_path, numbered_logs):
    told = []
    for _ in range(2):
        run = Run(config_in(tmp_path))
        assert run.run() and run.evaluate().episodes == 2
        told.append(status_in(tmp_path))
    assert told[0].pop("updated") < told[1].pop("updated") and told[0] == told[1]
    assert (tmp_path / "train.log").readlink() == Path("logs/rl_training_start_0.log")
    assert "held-out episodes" in (tmp_path / "logs/rl_training_start_1.log").read_text()


def test_a_start_that_fails_keeps_how_far_the_run_was(tmp_path, monkeypatch):
    env, evaluation = {"name": "gym:CartPole-v1", "success_return": 5}, {"every": 1, "episodes": 2}
    config = config_in(tmp_path, env=env, evaluation=evaluation)
    stop_after(1, Run(config))
    told = status_in(tmp_path)
    assert told["progress"]["updates"] == 1 and told["best"]["update"] == 1
    monkeypatch.setattr("sparring.runs.run.read_state", fail_with(CheckpointError("written by 2 processes")))
    with pytest.raises(CheckpointError):
        Run(config)
    now = status_in(tmp_path)
    assert (now["state"], now["why"].splitlines()[0]) == ("crashed", "written by 2 processes")
    for name in ("progress", "best", "last", "started", "seconds"):
        assert now[name] == told[name]


def test_what_starts_from_the_beginning_says_so(tmp_path, numbered_logs):
    run = Run(config_in(tmp_path))
    # killed after an update, before any checkpoint
    run.recorder.write(run.phase.progress, {})
    again = Run(config_in(tmp_path))
    assert not (tmp_path / "episode_metrics.jsonl").exists()
    assert again.run()
    Run(config_in(tmp_path))
    said = f"'{tmp_path}' holds an earlier attempt without a checkpoint: starts from the beginning"
    logs = [(tmp_path / f"logs/rl_training_start_{number}.log").read_text() for number in range(3)]
    assert [log.count(said) for log in logs] == [0, 1, 0]


def test_a_stop_between_two_lines_leaves_one_to_look_at(tmp_path):
    training = {"iterations": 5, "log_every": 5}
    stop_after(3, Run(config_in(tmp_path, training=training)))
    (line,) = lines_in(tmp_path)
    assert line["update"] == 3 and line["avg_loss"] is not None
    # of a run that goes on it is forgotten: its updates are in the next one
    stop_after(4, Run(config_in(tmp_path, training=training)))
    assert [line["update"] for line in lines_in(tmp_path)] == [4]
    assert Run(config_in(tmp_path, training=training)).run()
    assert [line["update"] for line in lines_in(tmp_path)] == [5]


def test_a_finished_run_that_goes_further_is_told_of_anew(tmp_path, numbered_logs):
    assert Run(config_in(tmp_path)).run()
    told = status_in(tmp_path) | {"pid": 1, "host": "elsewhere"}
    (tmp_path / "status.json").write_text(json.dumps(told))
    shutil.rmtree(checkpoints(tmp_path)[-1])
    assert Run(config_in(tmp_path)).run()
    now = status_in(tmp_path)
    assert (now["state"], now["pid"], now["host"]) == ("finished", os.getpid(), socket.gethostname())
    assert (tmp_path / "train.log").readlink() == Path("logs/rl_training_start_1.log")
