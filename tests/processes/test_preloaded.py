"""Processes forked by preloaded.py equal normally started ones, except for imported modules."""

import json
import os
import signal
import subprocess
import sys

import preloaded
import psutil
import pytest

from sparring.envs.configs import GymConfig
from sparring.envs.workers import ProcessBackend

pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's prctl"),
]
REPORT = """
import json, os, random, signal, sys, threading
report = {name: getattr(sys, name) for name in ("argv", "path", "executable")}
report |= {"folder": os.getcwd(), "environment": dict(os.environ), "input": sys.stdin.read(), "name": __name__}
report["signals"] = [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
report["threads"] = threading.active_count()
report["is_leader"] = [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()]
report["given"] = os.read(int(sys.argv[1]), 10).decode()
torch_was_there = "torch" in sys.modules
import torch
import numpy
print(json.dumps(report))
print(torch_was_there, random.random(), numpy.random.rand(), torch.initial_seed(), file=sys.stderr)
raise SystemExit(5)
"""

# a module that a command imports as an env
STARTS = """
import os, subprocess, sys
from gymnasium.envs.classic_control import CartPoleEnv as Env
done = subprocess.run([sys.executable, "-c", "import os, sys; print(os.getppid(), 'torch' in sys.modules)"],
                      capture_output=True, text=True)
parent, has_torch = done.stdout.split()
print("its child:", int(parent) == os.getpid(), has_torch)
"""


def report(start, folder, **how) -> tuple[dict, list[str]]:
    read, write = os.pipe()
    os.write(write, b"given")
    words = [sys.executable, "-c", REPORT, str(read), "a word"]
    how |= {"cwd": folder, "env": os.environ | {"MINE": "yes"}, "pass_fds": [read], "text": True}
    with start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how) as process:
        out, err = process.communicate("typed")
    for file in (read, write):
        os.close(file)
    assert process.returncode == 5, err
    return json.loads(out), err.split()


@pytest.mark.parametrize("how", [{}, {"start_new_session": True}, {"process_group": 0}], ids=str)
def test_forked_process_has_the_state_of_a_new_one(tmp_path, how):
    (started, _), (forked, random) = report(preloaded.Real, tmp_path, **how), report(subprocess.Popen, tmp_path, **how)
    # the number of the pipe
    forked["argv"][1] = started["argv"][1]
    assert started == forked
    assert random[0] == "True"
    again = report(subprocess.Popen, tmp_path, **how)[1]
    assert all(one != other for one, other in zip(random[1:], again[1:], strict=True))


def test_forked_process_is_a_child_that_can_be_killed():
    words = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"begun\n" and process.poll() is None
        child = psutil.Process(process.pid)
        assert child in psutil.Process().children() and child.children() == []
        process.kill()
    assert process.returncode == -signal.SIGKILL


def test_child_of_a_forked_command_is_forked(tmp_path):
    """A forked command forks its own child processes."""
    (tmp_path / "starts.py").write_text(STARTS)
    words = ["config", "env.name=starts:Env"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    command = [sys.executable, "-m", "sparring", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "its child: True True\n" in done.stdout, done.stderr


def test_env_workers_and_other_options_are_not_forked():
    backend = ProcessBackend(GymConfig(name="gym:CartPole-v1", workers=1), 1)
    (worker,) = backend._pool.workers
    assert "sparring.envs.worker_main" in psutil.Process(worker.process.pid).cmdline()
    backend.close()
    for options, is_forked in ((["-W", "error"], False), (["-u"], True)):
        with subprocess.Popen([sys.executable, *options, "-c", "input()"], stdin=subprocess.PIPE) as process:
            assert ("preloaded" in " ".join(psutil.Process(process.pid).cmdline())) is is_forked
            process.communicate(b"\n")
