"""Processes that tests fork are what those that users start are, but for what is imported."""

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
TELL = """
import json, os, random, signal, sys, threading
told = {name: getattr(sys, name) for name in ("argv", "path", "executable")}
told |= {"folder": os.getcwd(), "environment": dict(os.environ), "input": sys.stdin.read(), "name": __name__}
told["signals"] = [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
told["threads"] = threading.active_count()
told["is_leader"] = [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()]
told["given"] = os.read(int(sys.argv[1]), 10).decode()
torch_was_there = "torch" in sys.modules
import torch
import numpy
print(json.dumps(told))
print(torch_was_there, random.random(), numpy.random.rand(), torch.initial_seed(), file=sys.stderr)
raise SystemExit(5)
"""

# a module that is imported by a command, in the place of an env
STARTS = """
import os, subprocess, sys
from gymnasium.envs.classic_control import CartPoleEnv as Env
done = subprocess.run([sys.executable, "-c", "import os, sys; print(os.getppid(), 'torch' in sys.modules)"],
                      capture_output=True, text=True)
parent, has_torch = done.stdout.split()
print("its child:", int(parent) == os.getpid(), has_torch)
"""


def told(start, folder, **how) -> tuple[dict, list[str]]:
    read, write = os.pipe()
    os.write(write, b"given")
    words = [sys.executable, "-c", TELL, str(read), "a word"]
    how |= {"cwd": folder, "env": os.environ | {"MINE": "yes"}, "pass_fds": [read], "text": True}
    with start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how) as process:
        out, err = process.communicate("typed")
    for file in (read, write):
        os.close(file)
    assert process.returncode == 5, err
    return json.loads(out), err.split()


@pytest.mark.parametrize("how", [{}, {"start_new_session": True}, {"process_group": 0}], ids=str)
def test_it_is_started_with_what_a_fresh_one_is_started_with(tmp_path, how):
    (fresh, _), (forked, chance) = told(preloaded.Real, tmp_path, **how), told(subprocess.Popen, tmp_path, **how)
    # the number of a file
    forked["argv"][1] = fresh["argv"][1]
    assert fresh == forked
    assert chance[0] == "True"
    again = told(subprocess.Popen, tmp_path, **how)[1]
    assert all(one != other for one, other in zip(chance[1:], again[1:], strict=True))


def test_it_is_a_child_that_can_be_killed_and_it_is_alone():
    words = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"begun\n" and process.poll() is None
        child = psutil.Process(process.pid)
        assert child in psutil.Process().children() and child.children() == []
        process.kill()
    assert process.returncode == -signal.SIGKILL


def test_what_a_command_starts_is_forked_and_a_child_of_the_command(tmp_path):
    """And ends with it, as all else that was forked."""
    (tmp_path / "starts.py").write_text(STARTS)
    words = ["config", "env.name=starts:Env"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    command = [sys.executable, "-m", "sparring", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "its child: True True\n" in done.stdout, done.stderr


def test_env_workers_and_what_has_other_options_are_fresh():
    backend = ProcessBackend(GymConfig(name="gym:CartPole-v1", workers=1), 1)
    (worker,) = backend._pool.workers
    assert "sparring.envs.worker_main" in psutil.Process(worker.process.pid).cmdline()
    backend.close()
    for options, is_forked in ((["-W", "error"], False), (["-u"], True)):
        with subprocess.Popen([sys.executable, *options, "-c", "input()"], stdin=subprocess.PIPE) as process:
            assert ("preloaded" in " ".join(psutil.Process(process.pid).cmdline())) is is_forked
            process.communicate(b"\n")
