"""A learner rank that dies, fails or hangs ends the run soon, the error names it, and the same command resumes."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sparring.processes.heartbeat import BARRIER, BEATS, COLLECTIVE, ENTERED, PLACE, UPDATES, Watchdog
from sparring.processes.launch import _exit_code, _failure_message, launch
from sparring.runs.checkpoint import checkpoints

pytestmark = pytest.mark.usefixtures("forked")
SOON = 10.0
COMMAND = [sys.executable, "-m", "sparring", "train", "finetune", "--gpus", "2", "--envs", "2", "device=cpu"]
COMMAND += ["env.name=doubles_failing:Failing", "env.slow=0.002", "rollout.steps=8", "rollout.watchdog_s=2"]
COMMAND += ["policy.hidden=[16]", "training.save_every=1", "training.iterations=1000000", "rollout.render_episodes=0"]


@contextmanager
def training(folder, *more):
    """Two ranks after at least one new update; at the end, all processes are killed."""
    lines = folder / "run" / "episode_metrics.jsonl"
    before = lines.read_text().count("\n") if lines.exists() else 0
    path = os.pathsep.join([str(Path(__file__).parents[1] / "doubles"), *sys.path])
    words = [*COMMAND, "--output", str(folder / "run"), f"env.file={folder / 'word'}", *more]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        deadline = time.monotonic() + 60
        while not lines.exists() or lines.read_text().count("\n") < before + 2:
            assert launcher.poll() is None and time.monotonic() < deadline, launcher.stderr.read()
            time.sleep(0.02)
        yield launcher
    finally:
        for process in psutil.Process(launcher.pid).children(recursive=True) if launcher.poll() is None else []:
            # resource trackers end by themselves and free shared memory of the others
            with suppress(psutil.NoSuchProcess):
                if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()
        launcher.kill()
        launcher.communicate()


def ranks(launcher) -> list[psutil.Process]:
    def rank(process: psutil.Process) -> str:
        # a forked process has its rank in its name: psutil reads the environment of its server
        return process.environ().get("RANK", "") or process.name().partition("rank ")[2]

    return sorted(filter(rank, psutil.Process(launcher.pid).children()), key=rank)


def ended(launcher) -> tuple[str, float, list]:
    """Its stderr, and the seconds until it ended."""
    began, processes = time.monotonic(), psutil.Process(launcher.pid).children(recursive=True)
    err = launcher.communicate(timeout=60)[1]
    seconds = time.monotonic() - began
    gone, left = psutil.wait_procs(processes, max(0.0, SOON - seconds))
    assert not left
    return err, seconds


def assert_resumes(folder, err, *more):
    """The same command resumes from the checkpoint that the error named."""
    named = re.search(r"The same command resumes from (\S+/checkpoint-\d+)\.", err).group(1)
    last = checkpoints(folder / "run")[-1]
    assert Path(named) == last
    (folder / "word").unlink(missing_ok=True)
    # nothing hangs now; the limit is for busy machines
    with training(folder, "rollout.watchdog_s=60", *more) as launcher:
        launcher.terminate()
        err = launcher.communicate(timeout=60)[1]
        assert launcher.returncode == 130 and f"resumes from {last}" in err, err


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_ends_the_run(tmp_path, rank):
    with training(tmp_path) as launcher:
        victim = ranks(launcher)[rank]
        victim.kill()
        err, seconds = ended(launcher)
    assert (
        f"sparring: process {rank} (pid {victim.pid}) of 0..1 died: killed by signal 9 (SIGKILL, often by the system"
        in err
    )
    assert launcher.returncode == 1 and seconds < SOON
    # the other rank exits with a one-line error
    assert "another process of this run has ended" in err and "Traceback" not in err
    if rank == 1:
        assert_resumes(tmp_path, err)


@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_rank_ends_the_run(tmp_path, rank):
    with training(tmp_path) as launcher:
        victim = ranks(launcher)[rank]
        victim.suspend()
        err, seconds = ended(launcher)
    hangs = f"process {rank} (pid {victim.pid}) of 0..1 had no heartbeat for rollout.watchdog_s=2 seconds"
    assert hangs in err and launcher.returncode == 1 and seconds < SOON
    if rank == 0:
        assert_resumes(tmp_path, err)


def test_exception_in_one_rank_ends_the_run(tmp_path):
    """Both ranks save together before they exit."""
    rarely = "training.save_every=1000000"
    with training(tmp_path, rarely) as launcher:
        (tmp_path / "word").write_text("raise 1")
        victim = ranks(launcher)[1]
        err, seconds = ended(launcher)
    assert f"process 1 (pid {victim.pid}) of 0..1 failed with exit code 1; its output is above." in err
    assert err.count("Traceback") == 1 and "ZeroDivisionError: the gripper fell off" in err
    assert launcher.returncode == 1 and seconds < SOON
    assert re.search(r"failed after \d+ updates; saved", err)
    assert_resumes(tmp_path, err, rarely)


def test_run_continues_after_all_its_processes_were_stopped(tmp_path):
    """Ctrl-Z, and `fg` after longer than the watchdog's limit."""
    with training(tmp_path) as launcher:
        everyone = [*ranks(launcher), psutil.Process(launcher.pid)]
        for process in everyone:
            process.suspend()
        time.sleep(2.5)
        for process in reversed(everyone):
            process.resume()
        time.sleep(1)
        assert launcher.poll() is None
        launcher.send_signal(signal.SIGTERM)
        assert "The same command resumes it" in launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 130


def test_failed_start_of_a_rank_ends_the_others(tmp_path, monkeypatch):
    started, start = [], subprocess.Popen

    def popen(command, env):
        if started:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(start(["sleep", "60"]))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(OSError, match="temporarily unavailable"):
        launch(2, ["train"], 2.0, tmp_path)
    assert started[0].returncode == -signal.SIGKILL


def test_leave_runs_exit_handlers_and_no_destructors():
    code = """
import atexit, time
from concurrent.futures import ThreadPoolExecutor
from sparring.processes.launch import leave

class Aborts:
    def __del__(self):
        print("taken down")

kept = Aborts()
atexit.register(print, "put off")
ThreadPoolExecutor().submit(lambda: (time.sleep(0.2), print("begun", end=" ")))
print("said", end=" ")
leave(7)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "said begun put off\n", "")


@pytest.mark.parametrize(
    ("codes", "expected", "code"),
    [
        ([0, 0], None, 0),
        ([130, 130], None, 130),
        ([0, 130], None, 130),
        ([3, 1], "process 1 (pid 11) of 0..1 failed with exit code 1", 1),
        ([1, -11], "process 1 (pid 11) of 0..1 died: killed by signal 11 (SIGSEGV).", 1),
        # one rank reported a user error, the other that it is alone
        ([2, 3], None, 2),
        ([3, None, -9], "process 2 (pid 12) of 0..2 died: killed by signal 9 (SIGKILL, often by the system", 1),
    ],
)
def test_failure_message_names_the_rank_that_failed_first(codes, expected, code):
    workers = [SimpleNamespace(returncode=code, pid=10 + rank) for rank, code in enumerate(codes)]
    err = _failure_message(workers)
    assert err is None if expected is None else err.startswith(expected)
    assert _exit_code([code for code in codes if code is not None]) == code


# ---- the watchdog


class Ranks:
    def __init__(self, folder, watchdog_s=1.0):
        self.watchdog = Watchdog(folder / "heartbeats", 2, watchdog_s)
        self.rows = [rank.row for rank in self.watchdog.ranks]
        for row in self.rows:
            row[UPDATES] = 1

    def enter(self, rank, place):
        self.rows[rank][ENTERED] += 1
        self.rows[rank][PLACE] = place

    def seconds(self, count, beating=(0, 1)):
        """The first finding of the watchdog within `count` seconds, or None."""
        for _ in range(int(count * 20)):
            for rank in beating:
                self.rows[rank][BEATS] += 1
            if found := self.watchdog.check([0, 1], 0.05):
                return found
        return None


def test_missing_rank_hangs_at_a_collective_but_not_at_a_barrier(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.enter(0, BARRIER)
    assert ranks.seconds(5) is None
    ranks.enter(0, COLLECTIVE)
    assert ranks.seconds(0.9) is None
    assert ranks.seconds(0.2) == ([1], "did not enter the collective of the others")


def test_successive_collectives_are_no_hang(tmp_path):
    ranks = Ranks(tmp_path)
    for _ in range(10):
        ranks.enter(0, COLLECTIVE)
        assert ranks.seconds(0.6) is None


def test_limit_is_ten_times_longer_before_the_first_update(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.rows[1][UPDATES] = 0
    ranks.enter(0, COLLECTIVE)
    assert ranks.seconds(9.5) is None and ranks.seconds(1)[0] == [1]


def test_rank_without_heartbeat_hangs(tmp_path):
    ranks = Ranks(tmp_path)
    assert ranks.seconds(2) is None
    ranks.enter(0, BARRIER)
    assert ranks.seconds(1.5, beating=[0]) == ([1], "had no heartbeat")


def test_ranks_that_wait_for_each_other_hang(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.enter(0, COLLECTIVE), ranks.enter(1, BARRIER)
    assert ranks.seconds(1.5) == ([0, 1], "waited for each other")


def test_rank_that_has_not_started_is_no_hang(tmp_path):
    assert Ranks(tmp_path).seconds(60, beating=[0]) is None
