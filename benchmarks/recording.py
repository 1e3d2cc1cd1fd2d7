"""How much training time do metrics, logs, checkpoints, videos, TensorBoard, W&B and Rerun cost together?

    python benchmarks/recording.py [--only finetune teacher] [--rounds 10] [--cores 2] [--quick]

The same training runs with all recording and with none, each in its own process, with one torch and one simulator
thread. The two processes are halted (SIGSTOP) and continued in turns of a quarter of a second, so that load of the
machine affects both alike. The order of the first turn changes with every round: of two equal trainings, the first took
1.4 % longer. Timed is `Run.run()`: training, and the final wait for pending encodings. `finetune` makes no videos: it
ends before `logging.video_share` allows any; a world model makes some. Printed are means over the rounds of

    wall      seconds during which the process was running, on `--cores` cores: drawing and encoding may use cores
              that training leaves idle
    thread    CPU seconds of the training thread: the cost of recording within training itself
    calls     those of them outside of the phase's step: the recording alone, with hardly any noise
    all       CPU seconds of the process and of ffmpeg: the cost if one core did everything

and the share that recording adds to each (`calls`: as a share of `thread`), with its standard error. Without recording
there are no checkpoints, so their cost counts as recording. Target: wall and thread grow by less than 3 %.
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
# seconds for which one process runs while the other is halted
SLICE = 0.25
# all optional recording; videos are on by default
ON = {"logging.rerun": True, "logging.tensorboard": True, "logging.mode": "offline"}
# name -> settings of the training besides the defaults
TRAININGS = {
    "finetune": {"phase": "finetune", "training.total_timesteps": 60_000},
    "teacher": {"phase": "teacher", "training.iterations": 2, "training.log_every": 1},
}
QUICK = {
    "finetune": {"training.total_timesteps": 5000},
    "teacher": {"training.iterations": 1, "teacher.gradient_steps": 2, "world_model.tokenizer_steps": 2},
}
READY = "ready"
COMMON = {"threads": 1, "env.threads": 1, "device": "cpu"}


def train(settings: dict, recorded: bool) -> dict[str, float]:
    """Train in this process after a line arrives on stdin; return CPU seconds."""
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
    cpu_seconds = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    return {"thread": time.thread_time(), "all": cpu_seconds}


class Training:
    """A training process, ready and halted. Its children halt with it, except wandb-core, which has its own session."""

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
                raise SystemExit("a training ended before it was ready; see above")
        self._signal(signal.SIGSTOP)
        # the process reads this line when it continues
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def continue_for_slice(self) -> None:
        """Let it run for a slice of time, or until it ends."""
        began = time.perf_counter()
        self._signal(signal.SIGCONT)
        try:
            self.process.wait(SLICE)
            self.done = True
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGSTOP)
        self.seconds += time.perf_counter() - began

    def end(self) -> None:
        """Kill the process and its children if it has not ended."""
        if not self.done:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def as_dict(self) -> dict[str, float]:
        if self.process.returncode:
            raise SystemExit("a training failed; see above")
        return {"wall": self.seconds} | json.loads(self.process.stdout.read().splitlines()[-1])

    def _signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)


def measure_round(settings: dict, cores: int, on_first: bool) -> dict[bool, dict[str, float]]:
    """recorded -> clock -> seconds."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        folders = {on_first: one, not on_first: other}
        both: dict[bool, Training] = {}
        try:
            for recorded, folder in folders.items():
                both[recorded] = Training(settings, recorded, cores, folder)
            while not all(training.done for training in both.values()):
                for training in both.values():
                    if not training.done:
                        training.continue_for_slice()
        finally:
            for training in both.values():
                training.end()
        return {recorded: training.as_dict() for recorded, training in both.items()}


def take_turns(settings: dict, rounds: int, cores: int) -> dict[str, dict]:
    """clock -> means with and without recording, and the share that it adds, on average and in each round."""
    found = []
    for number in range(rounds):
        found.append(measure_round(settings, cores, on_first=number % 2 == 0))
        print(f"on {found[-1][True]} off {found[-1][False]}", file=sys.stderr, flush=True)
    return {clock: _compared(clock, found) for clock in found[0][True]}


def _compared(clock: str, rounds: list[dict[bool, dict[str, float]]]) -> dict:
    on, off = (statistics.fmean(turn[recorded][clock] for turn in rounds) for recorded in (True, False))
    base = "thread" if clock == "calls" else clock
    adds = [(turn[True][clock] - turn[False][clock]) / turn[False][base] for turn in rounds]
    error = statistics.stdev(adds) / len(adds) ** 0.5 if len(adds) > 1 else 0.0
    result = {"on_s": round(on, 2), "off_s": round(off, 2), "adds": round(statistics.fmean(adds), 4)}
    return result | {"error": round(error, 4), "each": [round(share, 4) for share in adds]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cores", type=int, default=2, help="number of cores for all processes")
    parser.add_argument("--quick", action="store_true", help="check that it runs: tiny sizes, results not stored")
    parser.add_argument("--turn", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        print(json.dumps(train(**args.turn)), flush=True)
        # the exit of the interpreter must not be timed
        os._exit(0)
    kept = report.RESULTS / "recording.json"
    results = json.loads(kept.read_text())["results"] if kept.is_file() else {}
    rows = [("training", "clock", "off s", "on s", "recording adds", "target")]
    for name in args.only:
        settings = COMMON | TRAININGS[name] | (QUICK[name] if args.quick else {})
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
