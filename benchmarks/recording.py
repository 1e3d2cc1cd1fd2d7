"""What does it cost to record: numbers, logs, videos, pictures, Rerun, and what else there is?

    python benchmarks/recording.py [--only finetune teacher] [--rounds 5] [--cores 2] [--quick]

The same training with all recording on and with none, turn by turn, each time in a process of its own, on one torch and
one simulator thread. What counts is `Run.run()`: training, and at its end the wait for what is still being encoded.
Told are medians of

    wall      seconds, with `--cores` to run on: drawing and encoding may use those that training leaves idle
    thread    CPU seconds of the thread that trains: what recording takes from training itself
    all       CPU seconds of the process and of ffmpeg: what it would cost if there was one core for everything

and the share that recording adds to each. Without recording there are no checkpoints either, so their cost is counted
as recording's. The target is that wall and thread grow by less than 3 %.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report

TARGET = 0.03
# all that can be switched on; videos are by default
ON = {"logging.rerun": True, "logging.tensorboard": True, "logging.mode": "offline"}
# name -> what is trained, by default settings but for how long
TRAININGS = {
    "finetune": {"phase": "finetune"},
    "teacher": {"phase": "teacher", "training.iterations": 6, "training.log_every": 1},
}
QUICK = {
    "finetune": {"training.total_timesteps": 5000},
    "teacher": {"training.iterations": 1, "teacher.gradient_steps": 2, "world_model.tokenizer_steps": 2},
}
ALIKE = {"threads": 1, "env.threads": 1, "device": "cpu"}


def train(settings: dict, recorded: bool) -> dict[str, float]:
    """In this process; seconds."""
    from sparring.config_text import parse_overrides
    from sparring.run import Run
    from sparring.tree import load_config

    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    run = Run(load_config(None, parse_overrides(words)), folder=recorded, quiet=True)
    before = _clocks()
    run.run()
    return {name: after - before[name] for name, after in _clocks().items()}


def _clocks() -> dict[str, float]:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "wall": time.perf_counter(),
        "thread": time.thread_time(),
        "all": own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime,
    }


def turn(settings: dict, recorded: bool, cores: int) -> dict[str, float]:
    """The same in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        given = settings | {"output": str(Path(folder, "run"))} | (ON if recorded else {})
        words = [sys.executable, __file__, "--turn", json.dumps({"settings": given, "recorded": recorded})]
        allowed = sorted(os.sched_getaffinity(0))[:cores]
        done = subprocess.run(
            words, stdout=subprocess.PIPE, check=True, preexec_fn=lambda: os.sched_setaffinity(0, allowed)
        )
    return json.loads(done.stdout.splitlines()[-1])


def take_turns(settings: dict, rounds: int, cores: int) -> dict[str, dict[str, float]]:
    """Clock -> medians with and without, and the share that recording adds."""
    times = {True: [], False: []}
    for number in range(rounds):
        # who goes first changes, so that a machine that gets busier favours none
        for recorded in (number % 2 == 0, number % 2 == 1):
            times[recorded].append(turn(settings, recorded, cores))
            print(f"{'on ' if recorded else 'off'} {times[recorded][-1]}", file=sys.stderr, flush=True)
    return {clock: _compared(clock, times[True], times[False]) for clock in times[True][0]}


def _compared(clock: str, with_it: list[dict], without: list[dict]) -> dict[str, float]:
    on, off = (statistics.median(turn[clock] for turn in turns) for turns in (with_it, without))
    return {"on_s": round(on, 2), "off_s": round(off, 2), "adds": round(on / off - 1, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=2, help="that all of it may run on")
    parser.add_argument("--quick", action="store_true", help="does it work? Tiny sizes, results not kept")
    parser.add_argument("--turn", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        print(json.dumps(train(**args.turn)))
        return
    about = report.metadata() | {"on": ON, "trainings": TRAININGS, "rounds": args.rounds, "run_on_cores": args.cores}
    results, rows = {}, [("training", "clock", "off s", "on s", "recording adds", "target")]
    for name in args.only:
        settings = ALIKE | TRAININGS[name] | (QUICK[name] if args.quick else {})
        results[name] = take_turns(settings, 1 if args.quick else args.rounds, args.cores)
        for clock, found in results[name].items():
            judged = clock != "all" and not args.quick
            met = "met" if found["adds"] < TARGET else "NOT MET"
            share = f"{found['adds']:+.1%}"
            rows.append((name, clock, found["off_s"], found["on_s"], share, f"< {TARGET:.0%} {met}" if judged else ""))
    print(report.table(rows))
    about["load_after"] = report.load()
    print(f"load before {about['load']}, after {about['load_after']}")
    if not args.quick:
        report.write_json(report.RESULTS / "recording.json", {"about": about, "results": results})


if __name__ == "__main__":
    main()
