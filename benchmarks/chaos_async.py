"""If a process of an asynchronous run dies or hangs, does the run end soon, name the failure, clean up, and resume?

Each trial is a real `sparring train finetune rollout.mode=async` on CartPole-v1 (4 robots, two worker processes). At a
random moment an env worker, the actor process or (with `--gpus 2`) a learner rank is killed or stopped (SIGKILL;
SIGSTOP, which makes it hang), or the policy raises or hangs while it acts. `rollout.watchdog_s` is 2. A trial stores
the seconds from the failure to the end of the command. Verdicts (all but `late` are bad):

- `hang`: no end within 60 s; `late`: an end after more than 10 s, which loaded machines may need
- `silent`: exit status 0; `not named`: the output does not name the failure
- `left`: one of its processes exists 10 s after the failure and 2 s after the end
- `no resume`: the same command does not resume from a checkpoint and make one more update; each trial resumes the
  previous one, and one more start follows the last trial
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

LATE_S, HANG_S, START_S = 10.0, 60.0, 180.0
WORDS = ["train", "finetune", "env.name=gym:CartPole-v1", "env.vectorize=process", "env.workers=2", "--envs", "4"]
# a worker that dies must end the run
WORDS += ["env.restarts=0"]
WORDS += ["policy.name=failing_policy:FailingPolicy", "policy.hidden=[16]", "rollout.steps=16", "threads=1"]
WORDS += ["rollout.mode=async", "rollout.staleness=1", "rollout.watchdog_s=2", "rollout.render_episodes=0"]
WORDS += ["device=cpu", "training.save_every=5", "training.iterations=1000000000"]


class NotStarted(Exception):
    pass


class Training:
    """The running command, in a folder; its policy fails as the file `order` demands (failing_policy.py)."""

    def __init__(self, folder: Path, *more: str):
        self.order, self.lines = folder / "order", folder / "run" / "episode_metrics.jsonl"
        self.log = folder / "output"
        self.order.unlink(missing_ok=True)
        resumes = self.saved()
        here = str(Path(__file__).parent)
        path = {"PYTHONPATH": os.pathsep.join([here, *sys.path])}
        words = [sys.executable, "-m", "sparring", *WORDS, "--output", str(folder / "run"), *more]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                words, env=os.environ | path | {"FAILING_POLICY": str(self.order)}, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_S
        # a resume may first remove lines that are newer than its checkpoint
        while resumes and "resumes from" not in self.output() and self._wait_for_start(deadline):
            pass
        first = self.updates()
        while (self.updates() < first + 2 or not self.saved()) and self._wait_for_start(deadline):
            pass

    def _wait_for_start(self, deadline: float) -> bool:
        time.sleep(0.05)
        if self.process.poll() is not None or time.monotonic() > deadline:
            self.end()
            raise NotStarted(f"the run did not start:\n{self.output()}")
        return True

    def saved(self) -> bool:
        return any(self.lines.parent.glob("checkpoint-*"))

    def updates(self) -> int:
        return self.lines.read_text().count("\n") if self.lines.exists() else 0

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def find(self, words: str) -> list[psutil.Process]:
        return [process for process in self.processes() if words in " ".join(process.cmdline())]

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def end(self) -> None:
        if self.process.poll() is None:
            kill([*self.processes(), psutil.Process(self.process.pid)])
        self.process.wait()


def kill(processes: list[psutil.Process]) -> None:
    """Kill all except the trackers of shared memory, which free the memory of killed processes and then end."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                process.kill()


@dataclass(frozen=True)
class Kind:
    """A fault, the report that must follow, and more settings."""

    fail: Callable[[Training, random.Random], None]
    reports: str
    more: tuple[str, ...] = ()


def strike(find: Callable[[Training], list[psutil.Process]], number: int) -> Callable:
    return lambda training, draw: draw.choice(find(training)).send_signal(number)


def order(word: str) -> Callable:
    return lambda training, draw: training.order.write_text(word)


def workers(training: Training) -> list[psutil.Process]:
    return training.find("sparring.envs.worker_main")


def actors(training: Training) -> list[psutil.Process]:
    return training.find("sparring.collect.remote.actor")


# the report names the active stage, or none
NO_PROGRESS = r"the actor process failed: (.* has not finished within|it is idle|it is stopped)"
BAD = ("hang", "silent", "not named", "left", "no resume")
CASES = {
    "env worker killed": Kind(strike(workers, signal.SIGKILL), r"WorkerError: worker \d \(.*\) died with exit code -9"),
    "env worker stopped": Kind(strike(workers, signal.SIGSTOP), NO_PROGRESS),
    "collecting process killed": Kind(strike(actors, signal.SIGKILL), "process failed: it died with exit code -9"),
    "collecting process stopped": Kind(strike(actors, signal.SIGSTOP), NO_PROGRESS),
    "policy raises": Kind(order("raise"), r"deciding \(the policy's act\): ZeroDivisionError: nothing comes to mind"),
    "policy hangs": Kind(order("hang"), r"deciding \(the policy's act\) has not finished within"),
    "learner rank killed": Kind(
        strike(Training.ranks, signal.SIGKILL), r"process \d .* of 0\.\.1 died: killed by signal 9", ("--gpus", "2")
    ),
    "learner rank stopped": Kind(
        strike(Training.ranks, signal.SIGSTOP), r"process \d .* of 0\.\.1 had no heartbeat", ("--gpus", "2")
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=50, help="failures, divided among the cases (default: 50)")


def trials(name: str, args: argparse.Namespace, work: Path) -> Iterator[dict]:
    """Each failure strikes the run that was resumed after the previous one; a last start checks that it resumes."""
    kind, rng, folder = CASES[name], random.Random(f"{args.seed} {name}"), work / name
    folder.mkdir()
    times = -(-args.times // len(args.only))
    for number in range(times + 1):
        try:
            training = Training(folder, *kind.more)
        except NotStarted as error:
            if not number:
                raise
            yield {"verdict": "no resume", "output": str(error)[-2000:], "of": times + 1}
            return
        try:
            found = fail(training, kind, rng) if number < times else {"verdict": "resumed"}
        finally:
            training.end()
        yield found | {"of": times + 1}


def summary(trials: list[dict]) -> dict:
    seconds = sorted(trial["seconds"] for trial in trials if "seconds" in trial)
    return {"worst_seconds": seconds[-1], "median_seconds": seconds[len(seconds) // 2]} if seconds else {}


def fail(training: Training, kind: Kind, rng: random.Random) -> dict:
    time.sleep(rng.uniform(0, 1))
    processes = training.processes()
    began = time.monotonic()
    kind.fail(training, rng)
    with suppress(subprocess.TimeoutExpired):
        training.process.wait(HANG_S)
    code, seconds = training.process.poll(), time.monotonic() - began
    _, left = psutil.wait_procs(processes, max(2.0, LATE_S - seconds))
    kill(left)
    found = {"seconds": round(seconds, 2), "exit_code": code}
    if code == 0:
        verdict = "silent"
    elif code is None:
        verdict = "hang"
    elif not re.search(kind.reports, training.output()):
        verdict = "not named"
    else:
        verdict = "left" if left else "late" if seconds > LATE_S else "ended"
    return {"verdict": verdict, **found} | ({"output": training.output()[-2000:]} if verdict in BAD else {})
