"""Start and end of a run: logs and status.json are correct, including after failures."""

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


def test_env_that_cannot_render_is_reported_once(tmp_path):
    rollout = {"n_envs": 2, "steps": 16, "render_episodes": 1}
    evaluation = {"episodes": 2, "every": 1}
    run = Run(config_in(tmp_path, env={"name": "gym_doubles:HasNoOpenGL"}, rollout=rollout, evaluation=evaluation))
    run.run()
    # two updates, an evaluation after each; only the first is announced
    assert (run.folder / "train.log").read_text().count("evaluating on 2 held-out episodes") == 1
    assert len((tmp_path / "evaluations.jsonl").read_text().splitlines()) == 2
    assert (run.folder / "train.log").read_text().count("no video: MuJoCo cannot draw gym_doubles:HasNoOpenGL") == 1


def test_full_disk_does_not_hide_the_error_of_a_run(tmp_path, monkeypatch):
    run = Run(config_in(tmp_path))
    full = fail_with(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("sparring.processes.rows.write_whole", full)
    monkeypatch.setattr(run.phase, "step", fail_with(ZeroDivisionError("what ended it")))
    with pytest.raises(ZeroDivisionError, match="what ended it"):
        run.run()
    log = (tmp_path / "train.log").read_text()
    assert log.count("status.json' (No space left on device); it is out of date") == 1


def test_failed_start_has_status_crashed(tmp_path, monkeypatch):
    monkeypatch.setattr("sparring.runs.run.make_sinks", fail_with(UserError("Weights & Biases did not start\nlog in")))
    with pytest.raises(UserError, match="did not start"):
        Run(config_in(tmp_path))
    status = status_in(tmp_path)
    assert (status["state"], status["why"]) == ("crashed", "Weights & Biases did not start") and status["ended"]
    assert "ended by an exception" in (tmp_path / "train.log").read_text()
    # the failed start does not block the folder
    monkeypatch.undo()
    assert Run(config_in(tmp_path)).run() and status_in(tmp_path)["state"] == "finished"


@pytest.mark.parametrize("error", [None, ZeroDivisionError("gone")])
def test_status_is_written_before_waiting_for_videos(tmp_path, monkeypatch, error):
    run, waits, closed = Run(config_in(tmp_path)), [], []
    finish = lambda timeout_s: waits.append((timeout_s, status_in(tmp_path)["state"], list(closed)))  # noqa: E731
    monkeypatch.setattr(run.recorder.videos, "finish", finish)
    monkeypatch.setattr(run.recorder, "close", lambda failed=False: closed.append(failed))
    if error:
        monkeypatch.setattr(run.phase, "step", fail_with(error))
        with pytest.raises(ZeroDivisionError):
            run.run()
    else:
        run.run()
    # after an error, sinks are closed after finished videos; the launcher waits no longer than GRACE_S
    assert waits == [(2.0, "crashed", []) if error else (120.0, "finished", [])]
    assert closed == ([True] if error else []) and AFTER_AN_ERROR_S < GRACE_S


def test_reason_in_the_status_is_cut_at_a_complete_phrase():
    status = Status(None, "finetune", "reach_d0", {})
    status.fail(Progress(), 0.5, UserError("a worker died; its last output:\n  Segmentation fault"))
    assert status.ended == ("crashed", "a worker died")


def test_evaluation_without_training_has_status_finished(tmp_path):
    Run(config_in(tmp_path)).evaluate()
    status = status_in(tmp_path)
    assert (status["state"], status["why"], status["progress"]["fraction"]) == ("finished", "not trained", 0.0)


def test_run_stopped_after_its_last_update_is_finished(tmp_path, monkeypatch):
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


def test_more_threads_than_cores_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("sparring.runs.run.usable_cores", lambda: 2)
    config = config_in(tmp_path)
    Run(config.model_copy(update={"threads": 2})).announce()
    log = tmp_path / "train.log"
    assert "threads=" not in log.read_text()
    Run(config.model_copy(update={"threads": 3})).announce()
    assert "threads=3 on 2 cores: " in log.read_text()


def test_several_processes_without_a_gpu_are_reported(tmp_path, monkeypatch):
    log = tmp_path / "train.log"
    run = Run(config_in(tmp_path))
    run.announce()
    monkeypatch.setattr(run.distributed, "world_size", 4)
    monkeypatch.setattr(run.distributed, "requested", "cpu")
    run.announce()
    assert "--gpus" not in log.read_text()
    monkeypatch.setattr(run.distributed, "requested", "auto")
    run.announce()
    assert "--gpus 4, but no GPU is visible: 4 processes share the CPU" in log.read_text()


def test_two_runs_of_a_process_have_separate_logs(tmp_path):
    one, two = Run(config_in(tmp_path / "one")), Run(config_in(tmp_path / "two"))
    one.run()
    two.run()
    one.evaluate()
    log = [(tmp_path / name / "train.log").read_text() for name in ("one", "two")]
    assert [text.count("held-out episodes:") for text in log] == [1, 0]
    for name in ("one", "two"):
        (file,) = (tmp_path / name / "logs/training").iterdir()
        assert [line.partition("update ")[2][0] for line in file.read_text().splitlines()] == ["1", "2"]


# ---- several starts


def stop_after(updates: int, run: Run) -> None:
    """Stop a run like Ctrl-C."""
    step = run.phase.step

    def step_and_stop(fraction):
        metrics = step(fraction)
        if run.phase.progress.updates == updates:
            os.kill(os.getpid(), signal.SIGINT)
        return metrics

    run.phase.step = step_and_stop
    assert not run.run()


@pytest.fixture
def numbered_logs(monkeypatch):
    """Name logs by start instead of time: two starts may be within a second."""
    numbers = count()
    clock = SimpleNamespace(strftime=lambda _: f"start_{next(numbers)}")
    monkeypatch.setattr("sparring.record.log.time", clock)


def lines_in(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]


def test_seconds_are_summed_over_starts(tmp_path):
    stop_after(1, Run(config_in(tmp_path)))
    status = status_in(tmp_path)
    assert 0 < status["seconds"] < 60
    # as if the first start had been earlier and longer
    (tmp_path / "status.json").write_text(json.dumps(status | {"seconds": 1000.0, "started": status["started"] - 9000}))
    assert Run(config_in(tmp_path)).run()
    now = status_in(tmp_path)
    assert now["state"] == "finished" and 1000 < now["seconds"] < 1060
    assert now["started"] == status["started"] - 9000 and now["ended"] > status["ended"]


def test_restart_of_a_finished_run_keeps_its_status(tmp_path, numbered_logs):
    status = []
    for _ in range(2):
        run = Run(config_in(tmp_path))
        assert run.run() and run.evaluate().episodes == 2
        status.append(status_in(tmp_path))
    assert status[0].pop("updated") < status[1].pop("updated") and status[0] == status[1]
    assert (tmp_path / "train.log").readlink() == Path("logs/rl_training_start_0.log")
    assert "held-out episodes" in (tmp_path / "logs/rl_training_start_1.log").read_text()


def test_failed_start_keeps_the_progress(tmp_path, monkeypatch):
    env, evaluation = {"name": "gym:CartPole-v1", "success_return": 5}, {"every": 1, "episodes": 2}
    config = config_in(tmp_path, env=env, evaluation=evaluation)
    stop_after(1, Run(config))
    status = status_in(tmp_path)
    assert status["progress"]["updates"] == 1 and status["best"]["update"] == 1
    monkeypatch.setattr("sparring.runs.run.read_state", fail_with(CheckpointError("written by 2 processes")))
    with pytest.raises(CheckpointError):
        Run(config)
    now = status_in(tmp_path)
    assert (now["state"], now["why"].splitlines()[0]) == ("crashed", "written by 2 processes")
    for name in ("progress", "best", "last", "started", "seconds"):
        assert now[name] == status[name]


def test_restart_without_checkpoint_is_logged(tmp_path, numbered_logs):
    run = Run(config_in(tmp_path))
    # killed after an update, before any checkpoint
    run.recorder.write(run.phase.progress, {})
    again = Run(config_in(tmp_path))
    assert not (tmp_path / "episode_metrics.jsonl").exists()
    assert again.run()
    Run(config_in(tmp_path))
    message = f"'{tmp_path}' holds an earlier attempt without a checkpoint: starts from the beginning"
    logs = [(tmp_path / f"logs/rl_training_start_{number}.log").read_text() for number in range(3)]
    assert [log.count(message) for log in logs] == [0, 1, 0]


def test_stop_between_two_lines_writes_one(tmp_path):
    training = {"iterations": 5, "log_every": 5}
    stop_after(3, Run(config_in(tmp_path, training=training)))
    (line,) = lines_in(tmp_path)
    assert line["update"] == 3 and line["avg_loss"] is not None
    # a resume removes this line: its updates are in the next one
    stop_after(4, Run(config_in(tmp_path, training=training)))
    assert [line["update"] for line in lines_in(tmp_path)] == [4]
    assert Run(config_in(tmp_path, training=training)).run()
    assert [line["update"] for line in lines_in(tmp_path)] == [5]


def test_further_training_of_a_finished_run_updates_its_status(tmp_path, numbered_logs):
    assert Run(config_in(tmp_path)).run()
    status = status_in(tmp_path) | {"pid": 1, "host": "elsewhere"}
    (tmp_path / "status.json").write_text(json.dumps(status))
    shutil.rmtree(checkpoints(tmp_path)[-1])
    assert Run(config_in(tmp_path)).run()
    now = status_in(tmp_path)
    assert (now["state"], now["pid"], now["host"]) == ("finished", os.getpid(), socket.gethostname())
    assert (tmp_path / "train.log").readlink() == Path("logs/rl_training_start_1.log")
