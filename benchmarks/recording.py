"""What does it cost to record: numbers, logs, videos, pictures, Rerun, and what else there is?

    python benchmarks/recording.py [--only finetune teacher] [--rounds 10] [--cores 2] [--quick]

The same training with all recording on and with none, each in processes of its own, on one torch and one simulator
thread. Both are under way at the same time, but only one at a time may run: they are halted in turns, a quarter of a
second each, so that a machine that gets busier or slower meanwhile favours neither. Who starts first changes with every
round: of two that are alike, it took 1.4 % longer. What counts is `Run.run()`: training, and at its end the wait for
what is still being encoded. No videos are made in `finetune`, which is over before `logging.video_share` allows any; of
a world model there are some. Told are means over the rounds of

    wall      seconds in which it was allowed to run, with `--cores` to run on: drawing and encoding may use those that
              training leaves idle
    thread    CPU seconds of the thread that trains: what recording takes from training itself
    calls     of these, the ones outside of the phase's step: recording's own, and hardly any noise
    all       CPU seconds of the process and of ffmpeg: what it would cost if there was one core for everything

and the share that recording adds to each (what is added to `calls`, as a share of `thread`), with its standard error.
Without recording there are no checkpoints either, so their cost is counted as recording's. The target is that wall and
thread grow by less than 3 %.
"""

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report

TARGET = 0.03
# seconds that one runs while the other is halted
SLICE = 0.25
# all that can be switched on; videos are by default
ON = {"logging.rerun": True, "logging.tensorboard": True, "logging.mode": "offline"}
# name -> what is trained, by default settings but for how long
TRAININGS = {
    "finetune": {"phase": "finetune", "training.total_timesteps": 60_000},
    "teacher": {"phase": "teacher", "training.iterations": 2, "training.log_every": 1},
}
QUICK = {
    "finetune": {"training.total_timesteps": 5000},
    "teacher": {"training.iterations": 1, "teacher.gradient_steps": 2, "world_model.tokenizer_steps": 2},
}
READY = "ready"
ALIKE = {"threads": 1, "env.threads": 1, "device": "cpu"}


def train(settings: dict, recorded: bool) -> dict[str, float]:
    """In this process, when there is a line to read; CPU seconds."""
    from sparring.config.schema import load_config
    from sparring.config.text import parse_overrides
    from sparring.runs.run import Run

    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    run = Run(load_config(None, parse_overrides(words)), folder=recorded, quiet=True)
    print(READY, flush=True)
    sys.stdin.readline()
    learning, step = [], run.phase.step

    def timed_step(fraction):
        began = time.thread_time()
        metrics = step(fraction)
        learning.append(time.thread_time() - began)
        return metrics

    run.phase.step = timed_step
    before = _clocks()
    run.run()
    spent = {name: after - before[name] for name, after in _clocks().items()}
    return spent | {"calls": spent["thread"] - sum(learning)}


def _clocks() -> dict[str, float]:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    all_of_it = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    return {"thread": time.thread_time(), "all": all_of_it}


class Training:
    """One of the two, ready to go, and halted with what it started; but wandb-core has a session of its own."""

    def __init__(self, settings: dict, recorded: bool, cores: int, folder: str):
        given = settings | {"output": str(Path(folder, "run"))} | (ON if recorded else {})
        words = [sys.executable, __file__, "--turn", json.dumps({"settings": given, "recorded": recorded})]
        allowed = sorted(os.sched_getaffinity(0))[:cores]
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, allowed),
        )
        self.seconds, self.done = 0.0, False
        while (line := self.process.stdout.readline()).strip() != READY:
            if not line:
                raise SystemExit("a training ended before it began; see above")
        self._signal(signal.SIGSTOP)
        # heard when it goes on
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def go_on(self) -> None:
        """For a slice of time, or until it is done."""
        began = time.perf_counter()
        self._signal(signal.SIGCONT)
        try:
            self.process.wait(SLICE)
            self.done = True
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGSTOP)
        self.seconds += time.perf_counter() - began

    def end(self) -> None:
        """Of one that was cut short, nothing is left."""
        if not self.done:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def as_dict(self) -> dict[str, float]:
        if self.process.returncode:
            raise SystemExit("a training failed; see above")
        return {"wall": self.seconds} | json.loads(self.process.stdout.read().splitlines()[-1])

    def _signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)


def one_round(settings: dict, cores: int, on_first: bool) -> dict[bool, dict[str, float]]:
    """On or off -> clock -> seconds."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        folders = {on_first: one, not on_first: other}
        both: dict[bool, Training] = {}
        try:
            for recorded, folder in folders.items():
                both[recorded] = Training(settings, recorded, cores, folder)
            while not all(training.done for training in both.values()):
                for training in both.values():
                    if not training.done:
                        training.go_on()
        finally:
            for training in both.values():
                training.end()
        return {recorded: training.as_dict() for recorded, training in both.items()}


def take_turns(settings: dict, rounds: int, cores: int) -> dict[str, dict]:
    """Clock -> means with and without, and the share that recording adds, of each round and on average."""
    found = []
    for number in range(rounds):
        found.append(one_round(settings, cores, on_first=number % 2 == 0))
        print(f"on {found[-1][True]} off {found[-1][False]}", file=sys.stderr, flush=True)
    return {clock: _compared(clock, found) for clock in found[0][True]}


def _compared(clock: str, rounds: list[dict[bool, dict[str, float]]]) -> dict:
    on, off = (statistics.fmean(turn[recorded][clock] for turn in rounds) for recorded in (True, False))
    whole = "thread" if clock == "calls" else clock
    adds = [(turn[True][clock] - turn[False][clock]) / turn[False][whole] for turn in rounds]
    error = statistics.stdev(adds) / len(adds) ** 0.5 if len(adds) > 1 else 0.0
    result = {"on_s": round(on, 2), "off_s": round(off, 2), "adds": round(statistics.fmean(adds), 4)}
    return result | {"error": round(error, 4), "each": [round(share, 4) for share in adds]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cores", type=int, default=2, help="that all of it may run on")
    parser.add_argument("--quick", action="store_true", help="does it work? Tiny sizes, results not kept")
    parser.add_argument("--turn", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        print(json.dumps(train(**args.turn)), flush=True)
        # how long an interpreter takes to leave is not asked
        os._exit(0)
    kept = report.RESULTS / "recording.json"
    results = json.loads(kept.read_text())["results"] if kept.is_file() else {}
    rows = [("training", "clock", "off s", "on s", "recording adds", "target")]
    for name in args.only:
        settings = ALIKE | TRAININGS[name] | (QUICK[name] if args.quick else {})
        rounds = 1 if args.quick else args.rounds
        about = report.metadata() | {"on": ON, "training": settings, "rounds": rounds, "run_on_cores": args.cores}
        clocks = take_turns(settings, rounds, args.cores)
        results[name] = {"about": about | {"load_after": report.load()}, "clocks": clocks}
        for clock, found in clocks.items():
            judged = clock in ("wall", "thread") and not args.quick
            met = "met" if found["adds"] < TARGET else "NOT MET"
            share = f"{found['adds']:+.1%} ± {found['error']:.1%}"
            rows.append((name, clock, found["off_s"], found["on_s"], share, f"< {TARGET:.0%} {met}" if judged else ""))
    print(report.table(rows))
    if not args.quick:
        report.write_json(kept, {"results": results})


if __name__ == "__main__":
    main()
