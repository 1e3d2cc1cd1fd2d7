"""After deliberate faults: is data lost, is foreign code executed, does a process hang? One part per kind of fault.

    python benchmarks/chaos.py all [--minutes 60] [--only kills server]
    python benchmarks/chaos.py PART [--minutes M] [--seed S] [--only CASE ...]

- kills: `kill -9` at random instants of every phase and mode; the same command resumes and reaches the same end
- writes: each system call that writes during a save fails, is cut short, or is the last one of its process
- corruption: damaged files in run folders, datasets, recordings and episode stores
- configs: random and broken configs and overrides
- envs: envs that hang, crash or return nonsense, in one process, in workers and with `rollout.mode=async`
- async: processes of an asynchronous run that are killed, stopped, raise or hang
- divergence: learning rates of 1e-6 to 1e30 in every phase
- hostile: run folders, checkpoints and datasets of others that try to execute code
- server: half-open, slow, huge and malformed requests to `sparring watch`
- soak: memory, open files and threads of endless runs
- cost: seconds that verification adds to saving and loading a checkpoint; measured, never bad

Cases take turns, one trial each. A part starts no trial after its minutes are over, and reports which cases are
complete. Results are stored in results/chaos_<part>.json; `--output FOLDER` selects another folder. `all` divides the
minutes among the parts and runs one after the other. Two parts may run at once. Exit status 1: a trial was bad.
"""

import argparse
import fcntl
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import report

# part -> minutes of its default trials on two idle cores, with a margin: the default of --minutes.
# Each is a module chaos_<part>.py:
# - CASES: the choices of --only; add_arguments(parser): its own options
# - trials(case, args, work): a generator of one dict per trial, with at least a "verdict"; "of" is the number of trials
#   of the case, if known. It prepares the case at the first trial
# - BAD: the verdicts that are bad; summary(trials): more figures of a case
PARTS = {
    **{"kills": 45, "writes": 75, "corruption": 20, "configs": 5, "envs": 30, "async": 15, "divergence": 30},
    **{"hostile": 15, "server": 6, "soak": 60, "cost": 3},
}
SAVE_EVERY_S = 60


@dataclass
class Case:
    trials: list[dict] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False

    def figures(self, part: ModuleType) -> dict:
        found: dict = {"trials": len(self.trials)}
        planned = [trial["of"] for trial in self.trials if "of" in trial]
        found |= {"of": planned[-1]} if planned else {}
        found |= {"complete": self.complete, "seconds": round(self.seconds, 1)}
        found |= Counter(trial["verdict"] for trial in self.trials)
        return found | part.summary(self.trials) | {"bad": [t for t in self.trials if t["verdict"] in part.BAD]}


def measure(part: ModuleType, args: argparse.Namespace, work: Path, save: Callable[[dict], None]) -> dict[str, dict]:
    """Run trials; return the figures of each started case. `save` stores them every minute and at the end."""
    began = saved_at = time.monotonic()
    end = began + 60 * args.minutes
    turns = {name: part.trials(name, args, work) for name in args.only}
    cases = {name: Case() for name in args.only}

    def figures() -> dict[str, dict]:
        return {name: case.figures(part) for name, case in cases.items() if case.trials or case.complete}

    try:
        while turns and time.monotonic() < end:
            # the case with the fewest trials
            name = min(turns, key=lambda name: len(cases[name].trials))
            case, before = cases[name], time.monotonic()
            trial = next(turns[name], None)
            now = time.monotonic()
            case.seconds += now - before
            if trial is None:
                case.complete = True
                del turns[name]
                continue
            case.trials.append(trial)
            if trial.get("of") == len(case.trials):
                case.complete = True
                turns.pop(name).close()
            if trial["verdict"] in part.BAD:
                print(f"{args.part} {name}: {trial}", flush=True)
            if now > saved_at + SAVE_EVERY_S:
                saved_at = now
                print(
                    f"{args.part}: {sum(len(c.trials) for c in cases.values())} trials, {now - began:.0f} s", flush=True
                )
                save(figures())
    finally:
        for trials in turns.values():
            trials.close()
        save(figures())
    return figures()


def store(file: Path, about: dict, found: dict[str, dict]) -> None:
    """Merge `found` into the file, under a lock: another process may measure other cases of the same part."""
    with open(Path(tempfile.gettempdir()) / f"sparring-chaos-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = json.loads(file.read_text())["cases"] if file.is_file() else {}
        about = about | {"load_after": report.load()}
        cases = kept | {name: {"about": about, **figures} for name, figures in found.items()}
        report.write_json(file, {"total": total(cases), "cases": cases})


def total(cases: dict[str, dict]) -> dict:
    """Sums of the counts of all cases."""
    sums = Counter[str]()
    for case in cases.values():
        sums.update({name: count for name, count in case.items() if type(count) is int})
    return {"cases": len(cases), **sums, "bad": sum(len(case["bad"]) for case in cases.values())}


def run_part(args: argparse.Namespace) -> int:
    about, began = report.metadata() | {"seed": args.seed}, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        work = (args.work or Path(scratch)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        # the part signs its files with its own key
        os.environ |= {"XDG_CONFIG_HOME": str(work / "key"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        file = args.output / f"chaos_{args.part}.json"
        found = measure(args.module, args, work, lambda figures: store(file, about, figures))
        summary = {"cases": len(found), "of": len(args.only), "complete": sum(c["complete"] for c in found.values())}
        summary |= {name: total(found).get(name, 0) for name in ("trials", "bad")}
        report.write_json(work / "summary.json", summary | {"seconds": round(time.monotonic() - began)})
    counted = list(dict.fromkeys(key for case in found.values() for key in case if type(case[key]) is int))
    rows = [(name, *(case.get(key, 0) for key in counted), len(case["bad"])) for name, case in found.items()]
    print(report.table([("case", *counted, "bad"), *rows]))
    unfinished = [name for name in args.only if name not in found or not found[name]["complete"]]
    if unfinished:
        print(f"{args.minutes:g} min were over before the end of {len(unfinished)} of {len(args.only)} cases")
    return 1 if summary["bad"] else 0


def run_all(args: argparse.Namespace) -> int:
    """Run each part in a new process. Time that a part does not need is left to the later ones."""
    end = time.monotonic() + 60 * args.minutes
    rows, bad = [], False
    for number, name in enumerate(args.only):
        minutes = max(0.0, end - time.monotonic()) / 60 * PARTS[name] / sum(PARTS[each] for each in args.only[number:])
        with tempfile.TemporaryDirectory(prefix="chaos-all-") as scratch:
            work = args.work / name if args.work else Path(scratch)
            words = [name, "--minutes", f"{minutes:.2f}", "--seed", str(args.seed)]
            words += ["--output", str(args.output), "--work", str(work)]
            print(f"== {' '.join(words[:3])}", flush=True)
            (work / "summary.json").unlink(missing_ok=True)
            code = subprocess.run([sys.executable, __file__, *words]).returncode
            file = work / "summary.json"
            found = json.loads(file.read_text()) if file.is_file() else {"complete": "none", "bad": f"exit code {code}"}
        reached = f"{found['complete']} of {found.get('of', '?')}"
        rows.append((name, reached, *(found.get(column, "") for column in ("trials", "bad", "seconds"))))
        bad |= bool(code)
    print(report.table([("part", "complete cases", "trials", "bad", "seconds"), *rows]))
    return int(bad)


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    for name, minutes in (PARTS | {"all": sum(PARTS.values())}).items():
        part = parts.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter)
        what = "start no trial after this (default: %(default)s)"
        part.add_argument("--minutes", type=float, default=minutes, help=what)
        part.add_argument("--seed", type=int, default=0)
        part.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")
        part.add_argument("--work", type=Path, help="keep run folders and output here, for inspection")
        choices = list(PARTS)
        if name in PARTS and name in words[:1]:
            module = importlib.import_module(f"chaos_{name}")
            part.description, choices = module.__doc__, list(module.CASES)
            module.add_arguments(part)
            part.set_defaults(module=module)
        part.add_argument(
            "--only", nargs="+", choices=choices, default=choices, metavar="CASE", help=", ".join(choices)
        )
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    # before torch is imported
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    args = parse_arguments(words)
    return run_all(args) if args.part == "all" else run_part(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
