"""Faults of an env end the run soon with a reason and leave no process; stop signals save and end the run."""

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
# the documented limit plus some seconds, for busy machines
SOON = 15.0
WORKERS = {"vectorize": "process", "workers": 2}


def faulty(folder, how, watchdog_s=1.0, groups=1, **env) -> dict:
    """Settings of a run whose envs fail in update 3 (the first rollout fits normalisers)."""
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
def test_hang_of_an_env_ends_the_run_which_is_saved(tmp_path, how, more):
    run = Run(config_in(tmp_path, **faulty(tmp_path, how, **more)))
    began = time.monotonic()
    with pytest.raises(StageFailed, match=r"simulating \(a step of the env\) has not finished within") as raised:
        run.run()
    assert time.monotonic() - began < SOON and "within 1 seconds (rollout.watchdog_s=1, " in str(raised.value)
    # the error names the env that hangs
    where = r" in worker 0 \(envs 0\.\.0\), worker 1 \(envs 1\.\.1\)" if more else r" in env \d \(faulty_envs:Faulty\)"
    assert re.search(f"group 0\\){where}$", str(raised.value))
    assert saved(tmp_path) == ["checkpoint-2"]
    assert (status_in(tmp_path)["state"], status_in(tmp_path)["why"]) == ("crashed", str(raised.value))


@pytest.mark.parametrize(
    ("how", "groups", "left"), [("hang in C", 1, []), ("hang in step", 2, ["checkpoint-2"])], ids=["C", "groups"]
)
def test_uninterruptible_hang_ends_the_process(tmp_path, how, groups, left):
    done, err = command(tmp_path, how, f"rollout.groups={groups}", "training.iterations=100")
    assert done.returncode == 1 and "Traceback" not in err
    assert err.count("sparring: simulating (a step of the env) has not finished within") == 1
    assert status_in(tmp_path)["state"] == "crashed" and saved(tmp_path) == left


@pytest.mark.parametrize(
    ("how", "number", "message"),
    [
        ("hang in C with the lock", signal.SIGABRT, "simulating (a step of the env) has not finished within"),
        ("segfault", signal.SIGSEGV, "the command ended without a message"),
        ("kill", signal.SIGKILL, "the command ended without a message"),
    ],
)
@linux
def test_guard_reports_faults_that_the_command_cannot(tmp_path, how, number, message):
    done, err = command(tmp_path, how, "training.iterations=100")
    assert done.returncode == -number and "Traceback" not in err
    assert err.count("sparring: ") == 1 and f"sparring: {message}" in err
    # the stack names the line of the env
    assert bool(re.search(r"faulty_envs.py\", line \d+ in _go_wrong", err)) == (how != "kill")


@pytest.mark.parametrize(("how", "killed"), [("child", True), ("stubborn child", False)])
@linux
def test_child_processes_of_an_env_end_with_the_command(tmp_path, how, killed):
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
def test_stop_signal_saves_although_an_env_hangs(tmp_path, monkeypatch, number, more):
    monkeypatch.setattr("sparring.runs.run._GRACE_S", 0.5)
    run = Run(config_in(tmp_path, **faulty(tmp_path, "hang in step", watchdog_s=60, **more)))
    step, timers = run.phase.step, []

    def step_and_send(fraction):
        if run.phase.progress.updates == 2:
            timers.append(threading.Timer(0.5, os.kill, (os.getpid(), number)))
            timers[0].start()
        return step(fraction)

    run.phase.step = step_and_send
    began = time.monotonic()
    assert not run.run() and time.monotonic() - began < SOON
    assert saved(tmp_path) == ["checkpoint-2"]
    assert status_in(tmp_path)["state"] == "interrupted"
    assert "stopped after 2 updates; saved. The same command resumes it." in (tmp_path / "train.log").read_text()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise in step", "simulating (a step of the env) failed: ValueError: the motor is on fire in env 0 ("),
        ("sys.exit", "simulating (a step of the env) failed: the env called sys.exit(0) in env 0 ("),
        ("generator exit", "simulating (a step of the env) failed: the env raised GeneratorExit in env 0 ("),
        ("memory", "simulating (a step of the env) failed: MemoryError: the scene is too large in env 0 ("),
        ("no reward", "step() of faulty_envs:Faulty returned the reward None; expected a number in env 0 ("),
        ("returns nothing", "step() of faulty_envs:Faulty returned None; expected (observation, reward, terminated, "),
        ("only its observation in reset", "reset() of faulty_envs:Faulty returned array("),
        (
            "wrong shape",
            "the observation of faulty_envs:Faulty has shape (2,) but its observation_space has shape (4,)",
        ),
        ("nan", "the final observation of env 0 (faulty_envs:Faulty) holds NaN or inf"),
    ],
)
@pytest.mark.parametrize("more", [[], ["env.vectorize=process"]], ids=["here", "workers"])
def test_error_of_an_env_is_reported_with_its_own_frames(tmp_path, capsys, how, message, more):
    words = ["env.name=faulty_envs:Faulty", f"env.kwargs.how={how}", "rollout.steps=16", "rollout.render_episodes=0"]
    words += ["rollout.watchdog_s=20", *more]
    assert main(["train", "finetune", "--envs", "2", "device=cpu", "--output", str(tmp_path), *words]) == 1
    _, _, err = capsys.readouterr().err.partition("sparring: ")
    raises = how in ("raise in step", "memory")
    if more:
        message = message.removeprefix("simulating (a step of the env) failed: ").removeprefix("the env ")
        assert message in err.partition("worker 0 (envs 0..0)")[2] and ("faulty_envs.py" in err) == raises
        return
    assert err.startswith(message)
    # frames of the package are omitted
    lines = err.partition("Traceback of the env:")[2]
    assert ("faulty_envs.py" in lines) == raises and "gym_batch" not in err


def test_child_processes_of_an_env_end_with_its_worker():
    env = make_env(config_in("unused", **faulty("unused", "child", **WORKERS)).env, 2)
    env.reset(0)
    workers = [worker.process.pid for worker in env.backend._pool.workers]
    for _ in range(56):
        env.backend.step(np.zeros((2, 1, 2), np.float32))
    children = [child for pid in workers for child in psutil.Process(pid).children()]
    assert [child.name() for child in children] == ["sleep", "sleep"]
    env.close()
    assert psutil.wait_procs(children, 5)[1] == []


def test_stages_time_out_individually_and_after_a_stop_request(monkeypatch):
    stages = OwnStages(2, 1.0)
    monkeypatch.setattr(OwnStages, "now", stages)
    with OwnStage("simulate", 1, timeout_s=math.inf):
        stages.check()
        stages.stop_at = time.monotonic()
        with pytest.raises(StageFailed, match=r"stop requested: simulating \(a step of the env\) was interrupted"):
            stages.check()
        # the clean-up afterwards is not interrupted
        stages.check()
    with OwnStage("state", timeout_s=-1.0):
        with pytest.raises(StageFailed, match="saving or restoring the state of the env has not finished within"):
            stages.check()
        # this process itself was stopped, like by Ctrl-Z
        stages._late_from = time.monotonic() + 60
        stages.check()
    assert not stages.has_hung
