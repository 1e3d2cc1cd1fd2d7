"""Worker processes: the same results as in one process, errors that name the worker, and clean ends."""

import logging
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import GymConfig
from sparring.envs.gym_batch import SerialBackend
from sparring.envs.worker_main import LEAVE_S
from sparring.envs.workers import ProcessBackend, WorkerError, _slices
from sparring.errors import UserError

DOUBLES = f"{__package__ + '.' if __package__ else ''}gym_doubles"


@pytest.fixture
def make():
    """Make process backends and close them after the test."""
    made = []

    def make(name="Counter", num_envs=2, workers=2, max_episode_steps=None, **kwargs):
        made.append(ProcessBackend(config(name, workers, **kwargs), num_envs, max_episode_steps))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def config(name, workers=0, restarts=0, **kwargs):
    name = name if ":" in name else f"{DOUBLES}:{name}"
    return GymConfig(name=name, workers=workers, restarts=restarts, kwargs=kwargs)


def chunks(num_envs, steps=1):
    return np.zeros((num_envs, steps, 1), np.float32)


def pids(backend):
    return [worker.process.pid for worker in backend._pool.workers]


def assert_same(one, two):
    for name in ("reward", "executed", "terminated", "truncated", "success", "ended"):
        a, b = getattr(one, name), getattr(two, name)
        assert a.dtype == b.dtype and (a == b).all(), name
    for a, b in ((one.observation, two.observation), (one.final, two.final)):
        assert a.keys() == b.keys() and all((a[key] == b[key]).all() for key in a)


# --- the same as in one process


@pytest.mark.parametrize("name", ["gym:CartPole-v1", "gym:Pendulum-v1"])
def test_trajectories_do_not_depend_on_processes(make, name):
    seeds = EpisodeSeeds(7, total_envs=5)
    backends = [SerialBackend(config(name), 5, 30), make(name, 5, 1, 30), make(name, 5, 3, 30)]
    assert backends[0].spec == backends[1].spec == backends[2].spec
    starts = [backend.reset(seeds)["state"] for backend in backends]
    assert (starts[0] == starts[1]).all() and (starts[0] == starts[2]).all()
    rng = np.random.default_rng(0)
    ended = 0
    for step in range(60):
        # chunks of 1, 2 and 3 steps
        action = rng.integers(0, 2, (5, 1 + step // 20, 1)).astype(np.float32)
        serial, one, three = (backend.step(action) for backend in backends)
        assert_same(serial, one)
        assert_same(serial, three)
        ended += len(serial.ended)
    assert ended >= 5


def test_state_moves_between_serial_and_process(make):
    serial, process = SerialBackend(config("gym:CartPole-v1"), 3), make("gym:CartPole-v1", 3, 2)
    serial.reset(EpisodeSeeds(2, total_envs=3))
    for _ in range(5):
        serial.step(chunks(3))
    process.set_state(serial.state())
    for _ in range(20):
        assert_same(serial.step(chunks(3)), process.step(chunks(3)))
    again = process.state()
    assert {key: value.tolist() for key, value in serial.state().items()} == {k: v.tolist() for k, v in again.items()}


def test_results_are_copies_and_include_frames(make):
    backend = make(num_envs=3, length=3)
    first = backend.reset(EpisodeSeeds(0))
    backend.record([2])
    step = backend.step(chunks(3, steps=2))
    backend.step(chunks(3, steps=1))
    assert first["state"][:, 0].tolist() == [0, 0, 0] and step.observation["state"][:, 0].tolist() == [2, 2, 2]
    assert list(step.frames) == [2] and [frame[0, 0, 0] for frame in step.frames[2]] == [1, 2]
    backend.step(chunks(3))
    assert (backend.render(1) == 1).all() and backend.render(1).shape == (4, 6, 3)
    assert backend.no_picture(1) is None


def test_the_spec_is_updated_when_an_env_reports_success(make):
    backend = make("Succeeds")
    backend.reset(EpisodeSeeds(0))
    assert not backend.spec.reports_success
    backend.step(chunks(2))
    assert backend.spec.reports_success


def test_workers_never_import_torch(make):
    backend = make("HasImported", module="torch")
    assert backend.reset(EpisodeSeeds(0))["state"].tolist() == [[1, 0, 0], [1, 0, 0]]


def test_envs_are_split_evenly():
    assert _slices(5, 2) == [range(0, 2), range(2, 5)]
    assert _slices(2, 8) == [range(0, 1), range(1, 2)]


# --- errors


def test_error_names_the_env_and_carries_the_traceback(make):
    seeds = EpisodeSeeds(0, total_envs=4)
    backend = make("Breaks", 4, 2, how="raise", only_seed=seeds(3, 0))
    backend.reset(seeds)
    backend.step(chunks(4))
    with pytest.raises(WorkerError) as caught:
        backend.step(chunks(4))
    message = str(caught.value)
    assert message.startswith("worker 1 (envs 2..3) failed: ZeroDivisionError: the gripper fell off in env 3 (")
    assert "gym_doubles.py" in message and 'raise ZeroDivisionError("the gripper fell off")' in message
    # replies still match requests
    assert backend.reset(seeds)["state"][:, 0].tolist() == [0, 0, 0, 0]


def test_an_error_at_creation_leaves_no_worker():
    before = set(psutil.Process().children())
    with pytest.raises(UserError, match=r"worker 0 \(envs 0..0\): env.name=gym:NoSuchEnv-v0 cannot be created"):
        ProcessBackend(config("gym:NoSuchEnv-v0", 2), 2)
    assert not [child for child in set(psutil.Process().children()) - before if "worker" in " ".join(child.cmdline())]


def test_death_of_a_worker_is_reported_at_once(make):
    seeds = EpisodeSeeds(0, total_envs=2)
    backend = make("Breaks", 2, 2, how="kill", only_seed=seeds(1, 0))
    backend.reset(seeds)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker 1 \(envs 1..1\) died with exit code -9"):
        backend.step(chunks(2, steps=2))
    assert time.monotonic() - start < 2
    with pytest.raises(RuntimeError, match="is closed; make a new one"):
        backend.step(chunks(2))


def test_the_error_of_a_crashed_worker_has_its_last_output(make, monkeypatch):
    monkeypatch.setattr(logging.getLogger("sparring"), "handlers", [logging.NullHandler()])
    backend = make("Breaks", 1, 1, how="crash")
    backend.reset(EpisodeSeeds(0))
    with pytest.raises(WorkerError, match="died with exit code -11; its last output:") as caught:
        backend.step(chunks(1, steps=2))
    lines = str(caught.value).splitlines()
    assert lines[1:3] == ["  about to crash", "  Fatal Python error: Segmentation fault"]
    assert any("gym_doubles.py" in line for line in lines[3:])


def test_death_is_noticed_while_another_worker_is_busy(make):
    seeds = EpisodeSeeds(0, total_envs=2)
    backend = make("Breaks", 2, 2, how="sleep", only_seed=seeds(0, 0))
    backend.reset(seeds)
    backend.step(chunks(2))
    os.kill(pids(backend)[1], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker 1 \(envs 1..1\) died with exit code -9"):
        backend.step(chunks(2))
    assert time.monotonic() - start < 2


def test_a_worker_that_dies_is_restarted_and_its_episode_is_truncated(make, caplog):
    seeds = EpisodeSeeds(0, total_envs=3)
    # env 2, in the second worker with env 1, dies in the third step of its first episode
    backend = make("Breaks", 3, 2, restarts=1, how="kill", length=3, only_seed=seeds(2, 0))
    backend.reset(seeds)
    backend.record([1])
    for _ in range(2):
        before = backend.step(chunks(3))
    with caplog.at_level("WARNING", "sparring.env"):
        step = backend.step(chunks(3))
    assert "died with exit code -9" in caplog.text and "restart 1 of 1 (env.restarts)" in caplog.text
    assert step.truncated.tolist() == [False, True, True] and not step.terminated.any()
    assert step.reward[1:].tolist() == [[0], [0]] and step.ended.tolist() == [1, 2]
    assert (step.final["state"] == before.observation["state"][1:]).all()
    # env 0 continues; the others have begun their second episodes
    assert step.observation["state"][:, 0].tolist() == [3, 0, 0]
    assert step.observation["state"][:, 1].tolist() == [seeds(0, 0) % 1000, seeds(1, 1) % 1000, seeds(2, 1) % 1000]
    later = [backend.step(chunks(3, steps)) for steps in (1, 2)][-1]
    assert later.observation["state"][:, 0].tolist() == [6, 3, 3] and list(later.frames) == [1]


def test_a_worker_is_restarted_a_limited_number_of_times(make):
    backend = make("Breaks", 2, 2, restarts=2, how="kill", only_seed=None)
    backend.reset(EpisodeSeeds(0))
    backend.step(chunks(2))
    both = backend.step(chunks(2))
    assert both.truncated.all()
    backend.step(chunks(2))
    with pytest.raises(WorkerError, match=r"worker 0 \(envs 0..0\) died with exit code -9"):
        backend.step(chunks(2))


def test_a_worker_that_dies_after_a_restored_state_begins_the_right_episode(make):
    seeds = EpisodeSeeds(3, total_envs=2)
    backend = make("Counter", 2, 2, length=3)
    backend.reset(seeds)
    for _ in range(4):
        backend.step(chunks(2))
    other = make("Counter", 2, 2, restarts=1, length=3)
    other.set_state(backend.state())
    assert_same(other.step(chunks(2)), backend.step(chunks(2)))
    os.kill(pids(other)[1], signal.SIGKILL)
    after = other.step(chunks(2))
    assert after.terminated.tolist() == [True, False] and after.truncated.tolist() == [False, True]
    assert after.final["state"][1, 0] == 2 and after.observation["state"][1, 1] == seeds(1, 2) % 1000


def test_a_signal_without_a_name_is_reported_by_its_number(make):
    backend = make(num_envs=1, workers=1)
    os.kill(pids(backend)[0], signal.SIGRTMIN + 1)
    with pytest.raises(WorkerError, match=f"died with exit code -{signal.SIGRTMIN + 1}"):
        backend.reset(EpisodeSeeds(0))


def test_an_interrupted_backend_refuses_to_step(make, monkeypatch):
    backend = make()
    backend.reset(EpisodeSeeds(0))

    def interrupted(check, may_die):
        raise KeyboardInterrupt

    monkeypatch.setattr(backend._pool.workers[0], "reply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.step(chunks(2))
    with pytest.raises(RuntimeError, match="interrupted in the middle of a step"):
        backend.step(chunks(2))


def test_class_of_the_script_itself_is_refused():
    with pytest.raises(ValueError, match="move the class to a module"):
        ProcessBackend(GymConfig(name="__main__:MyEnv"), 1)


# --- clean ends


def assert_gone(processes, seconds=3.0):
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in processes):
        assert time.monotonic() < deadline, "a worker is still there"
        time.sleep(0.02)


def test_close_ends_workers_and_memory_and_may_be_repeated(make):
    backend = make()
    workers, memory = pids(backend), backend._pool.memory
    # all processes have mapped it, so its file is unlinked and a killed process cannot leave it behind
    assert memory.bytes.nbytes and not memory.handle.file.exists()
    backend.close()
    backend.close()
    assert_gone(workers)
    assert backend._pool.memory is None


def test_workers_end_when_the_backend_is_garbage_collected():
    backend = ProcessBackend(config("Counter", 1), 1)
    workers = pids(backend)
    del backend
    assert_gone(workers)


# no main guard, and no close
SCRIPT = f"""
import sys, numpy as np
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import GymConfig
from sparring.envs.workers import ProcessBackend
config = GymConfig(name="{DOUBLES}:Breaks", workers=2, kwargs=dict(how=sys.argv[1], length=3))
backend = ProcessBackend(config, 2)
backend.reset(EpisodeSeeds(0))
backend.step(np.zeros((2, 2, 1), np.float32))
print(*(worker.process.pid for worker in backend._pool.workers), flush=True)
backend.step(np.zeros((2, 1, 1), np.float32))
"""


def start_script(how):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT, how],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_script_without_main_guard_or_close_ends_without_errors():
    script = start_script("nothing")
    output, errors = script.communicate(timeout=60)
    assert (script.returncode, errors) == (0, "")
    assert_gone(map(int, output.split()))


def test_ctrl_c_shows_the_parents_traceback_only():
    script = start_script("sleep")
    workers = [int(pid) for pid in script.stdout.readline().split()]
    time.sleep(0.2)
    os.killpg(script.pid, signal.SIGINT)
    # the parent does not wait for a worker that sleeps
    _, errors = script.communicate(timeout=60)
    assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt")
    assert_gone(workers)


def test_death_of_the_parent_ends_the_workers():
    script = start_script("nothing")
    workers = [int(pid) for pid in script.stdout.readline().split()]
    script.kill()
    script.communicate(timeout=60)
    assert_gone(workers)


def test_death_of_the_parent_ends_a_worker_that_never_ends_its_step():
    script = start_script("sleep")
    workers = [int(pid) for pid in script.stdout.readline().split()]
    time.sleep(0.2)
    script.kill()
    script.communicate(timeout=60)
    assert_gone(workers, LEAVE_S + 3)
