"""A failure of the actor process ends the run soon, with a reason and a checkpoint, and leaves no process."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
from test_remote import ROLLOUT, SMALL, assert_equal, config_in, trained, weights

from sparring.algorithms import ALGORITHMS
from sparring.collect.remote.learner import ActorProcess
from sparring.config.resolve import resolve
from sparring.config.schema import load_config
from sparring.envs import ENVS
from sparring.envs.env import make_env
from sparring.errors import StageFailed, UserError
from sparring.policies import POLICIES
from sparring.processes.child import Child, MessagePipe
from sparring.processes.heartbeat import DOING, StageDeadlines
from sparring.runs.checkpoint import checkpoints
from sparring.runs.run import Run

pytestmark = pytest.mark.usefixtures("forked")
COLLECT = Path(__file__).parents[2] / "src" / "sparring" / "collect"
# the documented limit in seconds
SOON = 10.0


def settings_in(folder, **rollout) -> dict:
    env = SMALL["env"] | {"file": str(folder / "fault"), "slow": 0.002}
    training = {"iterations": 100_000, "save_every": 100_000}
    rollout = ROLLOUT | {"mode": "async"} | rollout
    return SMALL | {"env": env, "training": training, "rollout": rollout, "output": str(folder / "run")}


def fails_in_update_3(folder, fail, **rollout) -> tuple[StageFailed, float]:
    """The raised error, and the seconds from the failure to the error."""
    run, began = Run(load_config(settings_in(folder, **rollout))), []
    update = run.phase.algorithm.update

    def update_and_fail(rollout, fraction):
        if run.phase.progress.updates == 3:
            began.append(time.monotonic())
            fail(folder, run)
        return update(rollout, fraction)

    run.phase.algorithm.update = update_and_fail
    with pytest.raises(StageFailed) as raised:
        run.run()
    seconds = time.monotonic() - began[0]
    assert run.phase.env.actor.child.process.returncode is not None
    return raised.value, seconds


def write_fault(fault):
    return lambda folder, run: (folder / "fault").write_text(fault)


def kill(folder, run):
    os.kill(int((folder / "fault.pid").read_text()), signal.SIGKILL)


def assert_resumes(folder, **rollout):
    """The run resumes from the checkpoint of the failure, with all updates before it."""
    (folder / "fault").unlink(missing_ok=True)
    (last,) = checkpoints(folder / "run")
    updates = int(last.name.rpartition("-")[2])
    assert updates >= 4
    settings = settings_in(folder, **rollout)
    config = load_config(settings)
    run = Run(config)
    assert run.phase.progress.updates == updates
    run.phase.step(0.1)
    assert run.phase.progress.updates == updates + 1
    run.phase.env.close()


@pytest.mark.parametrize("repetition", range(10))
def test_killed_actor_process_ends_the_run(tmp_path, repetition):
    # each time at another point of a rollout
    error, seconds = fails_in_update_3(tmp_path, lambda *a: (time.sleep(0.003 * repetition), kill(*a)))
    assert str(error).startswith("the actor process failed: it died with exit code -9; killed by a user or the system")
    assert seconds < SOON
    assert checkpoints(tmp_path / "run")
    if repetition == 0:
        assert_resumes(tmp_path)


@pytest.mark.parametrize("groups", [1, 2])
def test_exception_in_the_env_ends_the_run_with_its_traceback(tmp_path, groups):
    error, seconds = fails_in_update_3(tmp_path, write_fault("raise"), groups=groups)
    assert str(error).startswith("the actor process failed: simulating (a step of the env): ZeroDivisionError: the")
    assert "Traceback of the actor process:" in str(error) and "doubles_failing.py" in str(error)
    assert seconds < SOON
    assert_resumes(tmp_path, groups=groups)


@pytest.mark.parametrize("groups", [1, 2])
def test_hang_of_the_env_ends_the_run(tmp_path, groups):
    error, seconds = fails_in_update_3(tmp_path, write_fault("hang"), groups=groups, watchdog_s=1.5)
    assert str(error).startswith("the actor process failed: simulating (a step of the env) has not finished within")
    assert seconds < SOON
    assert_resumes(tmp_path, groups=groups)


@pytest.mark.usefixtures("not_forked")
def test_actor_process_stopped_while_waiting_for_weights_ends_the_run(tmp_path):
    """While it waits, no stage has a deadline."""

    def stop(folder, run):
        time.sleep(0.5)
        os.kill(int((folder / "fault.pid").read_text()), signal.SIGSTOP)

    error, seconds = fails_in_update_3(tmp_path, stop, watchdog_s=1.5)
    assert str(error).startswith("the actor process failed: it is stopped by a signal (SIGSTOP) for 1.5 seconds")
    assert seconds < SOON
    assert_resumes(tmp_path)


def test_receiving_an_incomplete_message_calls_the_watchdog():
    ours, theirs = Pipe()
    message = list(range(20_000))

    def wait():
        if not ours.poll(0.1):
            raise StageFailed("nothing comes")

    MessagePipe(theirs).send(message)
    assert MessagePipe(ours).receive(wait) == message
    MessagePipe(theirs).send(message)
    whole = []
    while ours.poll():
        whole.append(ours.recv_bytes())
    # parts of at most 16 KiB are written atomically
    assert len(whole) > 2 and max(map(len, whole)) <= 16_384
    for part in whole[:-1]:
        theirs.send_bytes(part)
    with pytest.raises(StageFailed):
        MessagePipe(ours).receive(wait)


def test_sending_to_a_blocked_receiver_calls_the_watchdog():
    ours, theirs = Pipe()
    room = select.poll()
    room.register(ours.fileno(), select.POLLOUT)

    def wait():
        if not room.poll(100):
            raise StageFailed("nobody reads")

    with pytest.raises(StageFailed):
        MessagePipe(ours).send(bytes(8_000_000), wait)


class ReadOnce:
    """Deadlines of a stage that ends right after the first read."""

    def __init__(self, seconds):
        self.reads = iter([np.array([[time.monotonic() + seconds]]), np.zeros((1, 1))])

    def copy(self):
        return next(self.reads)


def test_stage_that_ends_during_the_check_is_not_late():
    actor = object.__new__(ActorProcess)
    actor._has_reported, actor._check_alive, closed = True, lambda: None, []
    actor.close = closed.append
    actor.deadlines = StageDeadlines(ReadOnce(60.0), ("simulate",), 60.0)
    actor._check()
    actor.deadlines = StageDeadlines(ReadOnce(-1.0), ("simulate",), 60.0)
    with pytest.raises(StageFailed, match="has not finished within"):
        actor._check()
    assert len(closed) == 1


def test_actor_process_stopped_before_loading_its_state_ends_the_run(tmp_path):
    run = Run(load_config(settings_in(tmp_path, watchdog_s=0.2)))
    actor = run.phase.env.actor
    os.kill(actor.child.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    # states with images have megabytes, more than a pipe holds
    with pytest.raises(StageFailed, match=r"it is stopped by a signal \(SIGSTOP\) for 2 seconds"):
        actor.call("load_state_dict", {"picture": bytes(8_000_000)})
    assert time.monotonic() - began < SOON and actor.child.process.returncode is not None


# in the second case the actor process is in a step when its learner ends
@pytest.mark.parametrize("step_s", [0.0, 1.6])
def test_slow_env_is_closed_once(tmp_path, step_s):
    settings = settings_in(tmp_path)
    settings["env"] = settings["env"] | {"slow_close": 1.5}
    run = Run(load_config(settings))
    run.phase.step(0.0)
    if step_s:
        (tmp_path / "fault").write_text(f"slow {step_s}")
        # until a step has begun
        time.sleep(0.2)
    run.phase.env.close()
    assert (tmp_path / "fault.closing").read_text().split() == ["begins", "ends"]


def test_connection_error_of_the_simulator_is_reported_as_its_error(tmp_path):
    error, seconds = fails_in_update_3(tmp_path, write_fault("reset by peer"))
    assert "simulating (a step of the env): ConnectionResetError: the simulator has gone" in str(error)
    assert seconds < SOON and checkpoints(tmp_path / "run")


def test_error_between_two_stages_names_the_outer_stage(tmp_path):
    (tmp_path / "fault").write_text("wrong numbers")
    with pytest.raises(StageFailed, match=r"failed: collecting: env.reset: observation/state is torch.float64"):
        Run(load_config(settings_in(tmp_path))).run()


def test_every_stage_that_may_fail_has_a_description():
    used = re.findall(r'stopwatch\.stage\("(\w+)"', "".join(path.read_text() for path in COLLECT.rglob("*.py")))
    assert set(used) - {"learn", "take", "publish"} <= DOING.keys() and len(set(used)) > 8


@pytest.fixture
def gym_doubles(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "doubles")


def test_death_of_an_env_worker_ends_the_run(tmp_path, gym_doubles):
    env = {"name": "gym_doubles:Breaks", "vectorize": "process", "workers": 1, "restarts": 0}
    env["kwargs"] = {"how": "kill", "length": 30}
    settings = settings_in(tmp_path) | {"env": env}
    with pytest.raises(
        StageFailed, match=r"simulating \(a step of the env\): WorkerError: worker 0 .* died with exit code"
    ):
        Run(load_config(settings)).run()
    # on a busy machine the failure may be noticed before the second and third rollouts are used
    (saved,) = checkpoints(tmp_path / "run")
    assert saved.name in ("checkpoint-1", "checkpoint-2", "checkpoint-3")


def test_closing_an_env_ends_its_child_processes(gym_doubles):
    config = load_config({"env": {"name": "gym_doubles:HasSimulator", "vectorize": "process", "workers": 1}})
    env = make_env(config.env, 1)
    simulator = int(env.reset(0, "train", 0)["observation", "state"][0, 0])
    os.kill(simulator, 0)
    began = time.monotonic()
    env.close()
    assert time.monotonic() - began < 4
    assert_gone(simulator)


def test_user_error_of_the_actor_process_equals_that_of_sync(tmp_path, gym_doubles):
    # its argument `how` is missing
    settings = SMALL | {"env": {"name": "gym_doubles:Breaks"}, "rollout": ROLLOUT | {"mode": "async"}}
    with pytest.raises(UserError) as sync:
        Run(load_config(settings | {"rollout": ROLLOUT, "output": str(tmp_path)}))
    with pytest.raises(UserError) as remote:
        Run(load_config(settings | {"output": str(tmp_path)}))
    assert str(remote.value) == str(sync.value) and "Traceback" not in str(sync.value)


@pytest.mark.parametrize(
    ("key", "name"),
    [("env.name", "doubles_failing:Failing"), ("policy.name", "actor_critic"), ("algorithm", "ppo")],
)
def test_class_of_the_script_is_refused(tmp_path, monkeypatch, key, name):
    kinds = {"env.name": ENVS, "policy.name": POLICIES, "algorithm": ALGORITHMS}
    monkeypatch.setattr(sys.modules["__main__"], "Mine", resolve(name, kinds[key], key), raising=False)
    settings = {"env.name": SMALL["env"]["name"], "rollout": ROLLOUT | {"mode": "async"}, "output": str(tmp_path)}
    message = f"{key}='__main__:Mine' is defined .*, which the actor process cannot import; move the class to a mod"
    with pytest.raises(UserError, match=message):
        Run(load_config(settings | {key: "__main__:Mine"}))


CHILD = textwrap.dedent("""
    import json, sys
    import torch
    torch.set_num_threads(1)
    from sparring.runs.run import Run
    from sparring.config.schema import load_config
    run = Run(load_config(json.loads(sys.argv[1])))
    step = run.phase.step
    def step_and_print(fraction):
        metrics = step(fraction)
        if run.phase.progress.updates == 3:
            print(run.phase.env.actor.child.process.pid, flush=True)
        return metrics
    run.phase.step = step_and_print
    sys.exit(0 if run.run() else 130)
""")


def start_learner(folder) -> tuple[subprocess.Popen, int]:
    """A learner after 3 updates, and the id of its actor process."""
    path = os.pathsep.join(sys.path)
    words = [sys.executable, "-c", CHILD, json.dumps(settings_in(folder))]
    learner = subprocess.Popen(words, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path})
    return learner, int(learner.stdout.readline())


def assert_gone(pid: int) -> None:
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there")


@pytest.mark.usefixtures("not_forked")
def test_ctrl_c_saves_and_leaves_no_process(tmp_path):
    learner, actor = start_learner(tmp_path)
    learner.send_signal(signal.SIGINT)
    assert learner.wait(SOON) == 130
    assert_gone(actor)
    learner.stdout.close()
    assert_resumes_after_a_stop(tmp_path)


def test_sigterm_to_all_processes_saves(tmp_path):
    learner, actor = start_learner(tmp_path)
    for pid in (actor, learner.pid):
        os.kill(pid, signal.SIGTERM)
    assert learner.wait(SOON) == 130
    assert_gone(actor)
    learner.stdout.close()
    assert_resumes_after_a_stop(tmp_path)


def assert_resumes_after_a_stop(folder):
    (last,) = checkpoints(folder / "run")
    updates = int(last.name.rpartition("-")[2])
    settings = settings_in(folder)
    run = Run(load_config(settings))
    run.phase.step(0.1)
    assert run.phase.progress.updates == updates + 1 >= 4
    run.phase.env.close()


def test_killed_learner_ends_the_actor_process(tmp_path):
    learner, actor = start_learner(tmp_path)
    learner.kill()
    learner.wait()
    assert_gone(actor)
    learner.stdout.close()


def test_evaluations_during_training_do_not_change_it(tmp_path):
    rollout = ROLLOUT | {"mode": "async", "staleness": 0}
    without = trained(config_in(tmp_path / "without", {"evaluation": {"every": 0}}, **rollout))
    between = trained(config_in(tmp_path / "between", {"evaluation": {"every": 2, "episodes": 3}}, **rollout))
    assert len((tmp_path / "between" / "evaluations.jsonl").read_text().splitlines()) == 2
    assert not (tmp_path / "without" / "evaluations.jsonl").exists()
    assert between.phase.progress == without.phase.progress
    assert_equal(weights(without), weights(between))


def test_process_that_ends_during_the_check_is_not_stopped(monkeypatch):
    child = object.__new__(Child)
    child.process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
    # poll() reports the state before the exit
    monkeypatch.setattr(child.process, "poll", lambda: None)
    assert not child.is_stopped()
    assert child.process.wait() == 0
