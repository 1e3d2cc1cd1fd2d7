"""Whatever is killed or hangs, does an asynchronous run end soon, by name, with nothing left, and go on afterwards?

    python benchmarks/async_failures.py --times 50
    python benchmarks/async_failures.py --times 6 --only "policy hangs"       # measured again; the others are kept

Each repetition is a real `sparring train finetune rollout.mode=async` on CartPole-v1 (4 robots, two worker processes)
that learns until something happens to it, at a random moment: a worker of the env, the collecting process or (with
`--gpus 2`) a learner rank is killed or stopped (SIGKILL, SIGSTOP: a stopped process hangs), or the policy raises or
hangs while it decides. `rollout.watchdog_s` is 2. Of each repetition are kept:

- the seconds from the moment of the failure until the command has ended; 60 s without an end count as a hang
- whether what it said names what failed
- whether all processes that it had are gone within 10 s of the failure
- whether the same command then goes on from a checkpoint and makes one more update

Results: results/async_failures.json.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import report

RESULTS = report.RESULTS / "async_failures.json"
SOON, HANG_S, START_S = 10.0, 60.0, 180.0
WORDS = ["train", "finetune", "env.name=gym:CartPole-v1", "env.vectorize=process", "env.workers=2", "--envs", "4"]
WORDS += ["policy.name=failing_policy:FailingPolicy", "policy.hidden=[16]", "rollout.steps=16", "threads=1"]
WORDS += ["rollout.mode=async", "rollout.staleness=1", "rollout.watchdog_s=2", "rollout.render_episodes=0"]
WORDS += ["device=cpu", "training.save_every=5", "training.iterations=1000000000"]


class Training:
    """The command, under way in a folder; `word` is what its policy reads."""

    def __init__(self, folder: Path, *more: str):
        self.word, self.lines, self.log = folder / "word", folder / "run" / "episode_metrics.jsonl", folder / "said"
        self.word.unlink(missing_ok=True)
        goes_on = self.saved()
        here = str(Path(__file__).parent)
        path = {"PYTHONPATH": os.pathsep.join([here, *sys.path]), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "sparring", *WORDS, "--output", str(folder / "run"), *more]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                words, env=os.environ | path | {"FAILING_POLICY": str(self.word)}, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_S
        # it may begin by taking back lines that its checkpoint does not know of
        while goes_on and "goes on from" not in self.said() and self._may_still_begin(deadline):
            pass
        first = self.updates()
        while (self.updates() < first + 2 or not self.saved()) and self._may_still_begin(deadline):
            pass

    def _may_still_begin(self, deadline: float) -> bool:
        time.sleep(0.05)
        if self.process.poll() is not None or time.monotonic() > deadline:
            self.end()
            raise RuntimeError(f"it did not begin:\n{self.said()}")
        return True

    def saved(self) -> bool:
        return any(self.lines.parent.glob("checkpoint-*"))

    def updates(self) -> int:
        return self.lines.read_text().count("\n") if self.lines.exists() else 0

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def everyone(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def find(self, words: str) -> list[psutil.Process]:
        return [process for process in self.everyone() if words in " ".join(process.cmdline())]

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def end(self) -> None:
        if self.process.poll() is None:
            kill([*self.everyone(), psutil.Process(self.process.pid)])
        self.process.wait()


def kill(processes: list[psutil.Process]) -> None:
    """But for the trackers of shared memory, which end by themselves: they free what the killed ones leave."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                process.kill()


@dataclass(frozen=True)
class Kind:
    """What is done to a training, and what it must say of it."""

    fail: Callable[[Training, random.Random], None]
    says: str
    more: tuple[str, ...] = ()


def to_one(find: Callable[[Training], list[psutil.Process]], number: int) -> Callable:
    return lambda training, draw: draw.choice(find(training)).send_signal(number)


def policy(word: str) -> Callable:
    return lambda training, draw: training.word.write_text(word)


def workers(training: Training) -> list[psutil.Process]:
    return training.find("sparring.envs.worker_main")


def collecting(training: Training) -> list[psutil.Process]:
    return training.find("sparring.collect.remote.actor")


# the stage that was at work, or none
LATE = r"the collecting process failed: (.* has not come to an end|it does nothing|it is stopped)"
KINDS = {
    "env worker killed": Kind(to_one(workers, signal.SIGKILL), r"WorkerError: worker \d \(.*\) died with exit code -9"),
    "env worker stopped": Kind(to_one(workers, signal.SIGSTOP), LATE),
    "collecting process killed": Kind(to_one(collecting, signal.SIGKILL), "process failed: it died with exit code -9"),
    "collecting process stopped": Kind(to_one(collecting, signal.SIGSTOP), LATE),
    "policy raises": Kind(policy("raise"), r"deciding \(the policy's act\): ZeroDivisionError: nothing comes to mind"),
    "policy hangs": Kind(policy("hang"), r"deciding \(the policy's act\) has not come to an end"),
    "learner rank killed": Kind(
        to_one(Training.ranks, signal.SIGKILL), r"process \d .* of 0\.\.1 died: killed by signal 9", ("--gpus", "2")
    ),
    "learner rank stopped": Kind(
        to_one(Training.ranks, signal.SIGSTOP), r"process \d .* of 0\.\.1 gave no sign of life", ("--gpus", "2")
    ),
}


def repeat(name: str, times: int, seed: int) -> dict:
    """So many failures of this kind: how they ended."""
    found = _repeat_kind(KINDS[name], times, random.Random(f"{seed} {name}"))
    found |= {"commit": report.commit(), "load": report.load()}
    print(name, found, flush=True)
    return found


def _repeat_kind(kind: Kind, count: int, draw: random.Random) -> dict:
    """Each repetition happens to what the same command made of the last one; one more start shows that it goes on."""
    seconds, named, gone, resumed, untold = [], 0, 0, 0, []
    with tempfile.TemporaryDirectory() as place:
        for number in range(count + 1):
            training = Training(Path(place), *kind.more)
            resumed += number > 0
            try:
                if number < count:
                    took, said, left = _fail(training, kind, draw)
                    seconds.append(took)
                    named += bool(re.search(kind.says, said))
                    untold += [] if re.search(kind.says, said) else [said[-2000:]]
                    gone += not left
            finally:
                training.end()
    worst = max(seconds)
    result = {"repetitions": count, "hangs": sum(s >= HANG_S for s in seconds), "worst_seconds": round(worst, 2)}
    result |= {"median_seconds": round(sorted(seconds)[count // 2], 2), "within_10_s": sum(s < SOON for s in seconds)}
    return result | {"named": named, "nothing_left": gone, "resumed": resumed} | ({"untold": untold} if untold else {})


def _fail(training: Training, kind: Kind, draw: random.Random) -> tuple[float, str, list]:
    """Seconds until it had ended, what it said, and who was still there 10 s after the failure."""
    time.sleep(draw.uniform(0, 1))
    everyone = training.everyone()
    began = time.monotonic()
    kind.fail(training, draw)
    try:
        code = training.process.wait(HANG_S)
    except subprocess.TimeoutExpired:
        code = None
    took = time.monotonic() - began
    _, left = psutil.wait_procs(everyone, max(0.0, SOON - took))
    kill(left)
    if code == 0:
        raise RuntimeError(f"it ended as if nothing had happened:\n{training.said()}")
    return took, training.said(), left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=50, help="failures, shared out over the kinds (default: 50)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=KINDS, metavar="KIND", help=f"of {', '.join(KINDS)}")
    args = parser.parse_args()
    names = [name for name in KINDS if name in (args.only or KINDS)]
    if args.times < len(names):
        parser.error(f"--times {args.times}: expected {len(names)} or more, one for each kind that is asked for")
    kinds = json.loads(RESULTS.read_text())["kinds"] if args.only and RESULTS.is_file() else {}
    for number, name in enumerate(names):
        times = args.times // len(names) + (number < args.times % len(names))
        kinds[name] = repeat(name, times, args.seed)
        kinds = {name: kinds[name] for name in KINDS if name in kinds}
        report.write_json(RESULTS, {"about": report.metadata(), "seed": args.seed, "kinds": kinds})
    columns = ["repetitions", "hangs", "worst_seconds", "median_seconds", "named", "nothing_left", "resumed"]
    print(report.table([("kind", *columns), *((kind, *(row[c] for c in columns)) for kind, row in kinds.items())]))


if __name__ == "__main__":
    main()
