"""If an env hangs, crashes or returns nonsense, does the run end soon, with a one-line error, and clean up?

Each fault of tests/doubles/faulty_envs.py (20, and variants of them) occurs in a real `sparring train finetune`: in
the learner (sync), in two worker processes (workers), and in the actor process (async). `rollout.watchdog_s` is 3; the
first call of an env may take ten times as long. A trial stores the exit code, the last printed line (if an env ends the
learner, its guard reports it), the seconds from the fault to the end, and the checkpoints.

Verdicts: `ended`; bad: `hang` (no end within 90 s), `traceback` (except one of the env's own code, which follows our
error), `left` (processes, or files in /dev/shm), `silent` (an exit without the expected report).
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from chaos_kills import left_in_shared_memory

DOUBLES = Path(__file__).parents[1] / "tests" / "doubles"
sys.path.append(str(DOUBLES))
from faulty_envs import FAULTS, VARIANTS  # noqa: E402

HANG_S, LEFT_S, MARK = 90.0, 6.0, "ENV_FAULTS_RUN"
WORDS = ["train", "finetune", "env.name=faulty_envs:Faulty", "--envs", "2", "rollout.steps=8", "rollout.watchdog_s=3"]
WORDS += ["training.iterations=8", "ppo.mini_batch_size=8", "ppo.ppo_epochs=1", "policy.hidden=[8]", "threads=1"]
WORDS += ["device=cpu", "evaluation.episodes=2", "evaluation.baseline=false", "rollout.render_episodes=1"]
MODES = {"sync": [], "workers": ["env.vectorize=process", "env.workers=2"], "async": ["rollout.mode=async"]}
CASES = (*FAULTS, *VARIANTS)
BAD = ("hang", "traceback", "left", "silent")
# our own traceback: one of the env's code is indented below our error
OWN_TRACEBACK = re.compile(r"^Traceback \(most recent call last\)", re.M)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")


def trials(name: str, args: argparse.Namespace, work: Path) -> Iterator[dict]:
    for mode in args.modes:
        yield {"mode": mode} | strike(name, mode, work) | {"of": len(args.modes)}


def summary(trials: list[dict]) -> dict:
    return {"modes": {trial["mode"]: {k: v for k, v in trial.items() if k not in ("mode", "of")} for trial in trials}}


def strike(how: str, mode: str, work: Path) -> dict:
    """Run a command in which the fault occurs; return how it ended."""
    mark = uuid.uuid4().hex
    path = os.pathsep.join([str(DOUBLES), *filter(None, sys.path)])
    with tempfile.TemporaryDirectory(dir=work) as folder:
        since = Path(folder) / "since"
        environment = os.environ | {"PYTHONPATH": path, "FAULTY_SINCE": str(since), MARK: mark}
        words = [sys.executable, "-m", "sparring", *WORDS, *MODES[mode], f"env.kwargs.how={how}"]
        shared = set(os.listdir("/dev/shm"))
        with open(Path(folder) / "output", "w+") as output:
            command = [*words, "--output", str(Path(folder) / "run")]
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
            began = time.time()
            while process.poll() is None and time.time() - (_since(since) or began) < HANG_S:
                time.sleep(0.02)
            seconds = time.time() - (_since(since) or began)
            if hung := process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            # read the output after this: processes that outlive the command may still print
            left = [*_left(mark), *left_in_shared_memory(shared)]
            output.seek(0)
            text = output.read()
        saved = sorted(path.name for path in (Path(folder) / "run").glob("checkpoint-*"))
    errors = [line for line in text.splitlines() if line.startswith("sparring: ")]
    # an env may end the learner; its guard reports it
    died = mode == "sync" and how in ("exit", "kill", "segfault", "hang in C with the lock")
    reported = (code in (0, 130) and not died or len(errors) == 1) and (died or code in (0, 1, 2, 130))
    # a traceback after our error is the env's
    traceback = bool(OWN_TRACEBACK.search(("\n" + text).partition("\nsparring: ")[0]))
    verdict = "hang" if hung else "traceback" if traceback else "left" if left else "ended" if reported else "silent"
    found = {"verdict": verdict, "exit_code": code, "seconds": round(seconds, 2), "left": left, "saved": saved}
    return found | {"output": (errors or text.splitlines() or [""])[-1][:200]}


def _since(file: Path) -> float | None:
    return file.stat().st_mtime if file.exists() else None


def _left(mark: str) -> list[str]:
    """Commands of the processes that still exist some seconds later; they are killed."""
    deadline = time.monotonic() + LEFT_S
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    names = []
    for process in found:
        with suppress(psutil.Error):
            names.append(" ".join(process.cmdline())[:100])
            process.kill()
    return names


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
