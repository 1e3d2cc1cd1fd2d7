"""Whatever an env does, the run ends soon, says what it was, and leaves nothing; asked to stop, it saves and leaves."""

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import psutil
import pytest
from small_runs import SMALL, config_in, status_in

from sparring.cli.main import main
from sparring.envs.env import make_env
from sparring.errors import StageFailed
from sparring.processes.heartbeat import OwnStage, OwnStages
from sparring.runs.checkpoint import checkpoints
from sparring.runs.run import Run

pytestmark = pytest.mark.usefixtures("forked")
linux = pytest.mark.skipif(sys.platform != "linux", reason="commands have a guard on Linux only")
# of the promise: within the limit and some seconds; machines that run tests are busy
SOON = 15.0
WORKERS = {"vectorize": "process", "workers": 2}


def faulty(folder, how, watchdog_s=1.0, groups=1, **env) -> dict:
    """Settings of a run whose envs go wrong in update 3; a rollout before the first fits normalisers."""
    env = {"name": "faulty_envs:Faulty", "kwargs": {"how": how, "at": 56}} | env
    rollout = SMALL["rollout"] | {"watchdog_s": watchdog_s, "groups": groups}
    return {"env": env, "rollout": rollout, "training": {"iterations": 100, "save_every": 100}}


def command_of(folder, how, *more) -> list[str]:
    words = [f"env.kwargs.how={how}", "env.kwargs.at=56", "rollout.steps=16", "rollout.watchdog_s=1", *more]
    words += ["env.name=faulty_envs:Faulty", "--envs", "2", "rollout.render_episodes=0", "policy.hidden=[8]"]
    words += ["ppo.mini_batch_size=16", "evaluation.episodes=2", "device=cpu", "--output", str(folder)]
    return [sys.executable, "-m", "sparring", "train", "finetune", *words]


def command(folder, how, *more) -> tuple[subprocess.CompletedProcess, str]:
    done = subprocess.run(command_of(folder, how, *more), capture_output=True, timeout=90)
    return done, done.stderr.decode()


def is_sleep(process, folder) -> bool:
    with suppress(psutil.Error):
        return process.info["name"] == "sleep" and process.environ().get("STARTED_BY") == str(folder)
    return False


def saved(folder) -> list[str]:
    return [path.name for path in checkpoints(folder)]


@pytest.mark.parametrize("more", [{}, WORKERS], ids=["here", "workers"])
@pytest.mark.parametrize("how", ["hang in step", "hang in reset"])
def test_a_hang_ends_the_run_which_is_saved(tmp_path, how, more):
    run = Run(config_in(tmp_path, **faulty(tmp_path, how, **more)))
    began = time.monotonic()
    with pytest.raises(StageFailed, match=r"simulating \(a step of the env\) has not come to an end") as told:
        run.run()
    assert time.monotonic() - began < SOON and "rollout.watchdog_s=1 seconds" in str(told.value)
    assert saved(tmp_path) == ["checkpoint-2"]
    assert (status_in(tmp_path)["state"], status_in(tmp_path)["why"]) == ("crashed", str(told.value))


@pytest.mark.parametrize(
    ("how", "groups", "left"), [("hang in C", 1, []), ("hang in step", 2, ["checkpoint-2"])], ids=["C", "groups"]
)
def test_what_nothing_breaks_off_ends_with_the_process(tmp_path, how, groups, left):
    done, said = command(tmp_path, how, f"rollout.groups={groups}", "training.iterations=100")
    assert done.returncode == 1 and "Traceback" not in said
    assert said.count("sparring: simulating (a step of the env) has not come to an end") == 1
    assert status_in(tmp_path)["state"] == "crashed" and saved(tmp_path) == left


@pytest.mark.parametrize(
    ("how", "number", "says"),
    [
        ("hang in C with the lock", signal.SIGABRT, "simulating (a step of the env) has not come to an end"),
        ("segfault", signal.SIGSEGV, "the command ended without a message"),
        ("kill", signal.SIGKILL, "the command ended without a message"),
    ],
)
@linux
def test_the_guard_reports_what_the_command_cannot(tmp_path, how, number, says):
    done, said = command(tmp_path, how, "training.iterations=100")
    assert done.returncode == -number and "Traceback" not in said
    assert said.count("sparring: ") == 1 and f"sparring: {says}" in said
    # where the env is
    assert bool(re.search(r"faulty_envs.py\", line \d+ in _go_wrong", said)) == (how != "kill")


@pytest.mark.parametrize(("how", "killed"), [("child", True), ("stubborn child", False)])
@linux
def test_what_an_env_in_the_main_process_started_ends_with_the_command(tmp_path, how, killed):
    words = command_of(tmp_path, how, f"training.iterations={100_000 if killed else 40}")
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, env=os.environ | {"STARTED_BY": str(tmp_path)})
    while len(started := [each for each in psutil.process_iter(["name"]) if is_sleep(each, tmp_path)]) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    if killed:
        process.kill()
    assert process.wait(90) == (-signal.SIGKILL if killed else 0)
    assert psutil.wait_procs(started, SOON)[1] == []


@pytest.mark.parametrize("more", [{}, WORKERS], ids=["here", "workers"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_asked_to_stop_it_saves_although_an_env_hangs(tmp_path, monkeypatch, number, more):
    monkeypatch.setattr("sparring.runs.run._GRACE_S", 0.5)
    run = Run(config_in(tmp_path, **faulty(tmp_path, "hang in step", watchdog_s=60, **more)))
    step, timers = run.phase.step, []

    def step_and_ask(fraction):
        if run.phase.progress.updates == 2:
            timers.append(threading.Timer(0.5, os.kill, (os.getpid(), number)))
            timers[0].start()
        return step(fraction)

    run.phase.step = step_and_ask
    began = time.monotonic()
    assert not run.run() and time.monotonic() - began < SOON
    assert saved(tmp_path) == ["checkpoint-2"]
    assert status_in(tmp_path)["state"] == "interrupted"
    assert "stopped after 2 updates; saved. The same command resumes it." in (tmp_path / "train.log").read_text()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise in step", "simulating (a step of the env) failed: ValueError: the motor is on fire in env 0 ("),
        ("sys.exit", "simulating (a step of the env) failed: the env called sys.exit(0)"),
        ("no reward", "step() of faulty_envs:Faulty returned the reward None; expected a number"),
    ],
)
def test_what_an_env_raises_is_a_sentence_and_its_own_lines(tmp_path, capsys, how, says):
    words = ["env.name=faulty_envs:Faulty", f"env.kwargs.how={how}", "rollout.steps=16", "rollout.render_episodes=0"]
    assert main(["train", "finetune", "--envs", "2", "device=cpu", "--output", str(tmp_path), *words]) in (1, 2)
    _, _, said = capsys.readouterr().err.partition("sparring: ")
    assert said.startswith(says)
    # frames of ours are left out
    lines = said.partition("Traceback of the env:")[2]
    assert ("faulty_envs.py" in lines) == (how == "raise in step") and "gym_batch" not in said


def test_what_an_env_in_a_worker_started_ends_with_it():
    env = make_env(config_in("x", **faulty("", "child", **WORKERS)).env, 2)
    env.reset(0)
    workers = [worker.process.pid for worker in env.backend._pool.workers]
    for _ in range(56):
        env.backend.step(np.zeros((2, 1, 2), np.float32))
    children = [child for pid in workers for child in psutil.Process(pid).children()]
    assert [child.name() for child in children] == ["sleep", "sleep"]
    env.close()
    assert psutil.wait_procs(children, 5)[1] == []


def test_stages_are_late_by_their_own_time_and_once_asked_to_stop(monkeypatch):
    stages = OwnStages(2, 1.0)
    monkeypatch.setattr(OwnStages, "now", stages)
    with OwnStage("simulate", 1, timeout_s=math.inf):
        stages.check()
        stages.stop_at = time.monotonic()
        with pytest.raises(StageFailed, match=r"stop requested: simulating \(a step of the env\) was interrupted"):
            stages.check()
        # what is done to leave is not broken off
        stages.check()
    with OwnStage("state", timeout_s=-1.0):
        with pytest.raises(StageFailed, match="saving or restoring the state of the env has not come to an end"):
            stages.check()
        # this process was stopped itself, as by Ctrl-Z
        stages._late_from = time.monotonic() + 60
        stages.check()
    assert not stages.has_hung
