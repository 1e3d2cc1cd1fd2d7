"""Is anything lost, whatever happens to a run, and does it always end or go on? One part per kind of mishap.

    python benchmarks/chaos.py kills [--minutes 30] [--seed 0] [--only sync async0]
    python benchmarks/chaos.py writes [--minutes 10] [--seed 0] [--only finetune]

- kills: `kill -9` at random instants of every phase and mode; the same command goes on, to the same end
- writes: each call that writes during a save fails, is cut short, or is the last one of its process

Kept by part in results/chaos.json. A part stops when its minutes are over, and says how far it came. Exit status 1:
something was lost. Scripts of their own, for what has no place here: corruption.py (files that were damaged),
config_fuzz.py (configs and overrides), env_faults.py and async_failures.py (envs and processes that fail),
divergence.py (learning rates).
"""

import argparse
import fcntl
import importlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import report

RESULTS = report.RESULTS / "chaos.json"
# each a module chaos_<part>.py: CASES, what --only chooses from; add_arguments(parser); and measure(args, work, end):
# what was found of each case: counts, and "bad", a list of what went wrong
PARTS = ("kills", "writes")


def keep(part: str, about: dict, found: dict[str, dict]) -> dict:
    """Among other parts, and other cases of this one, which may be measured at the same time."""
    with open(Path(tempfile.gettempdir()) / f"sparring-chaos-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        cases = kept.get(part, {}).get("cases", {}) | {name: {"about": about, **case} for name, case in found.items()}
        total = Counter()
        for case in cases.values():
            total.update({name: count for name, count in case.items() if isinstance(count, int)})
        total["bad"] = sum(len(case["bad"]) for case in cases.values())
        report.write_json(RESULTS, dict(sorted((kept | {part: {"total": dict(total), "cases": cases}}).items())))
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    for name in PARTS:
        module = importlib.import_module(f"chaos_{name}")
        part = parts.add_parser(name, help=module.__doc__.splitlines()[0], description=module.__doc__)
        part.formatter_class = argparse.RawDescriptionHelpFormatter
        part.add_argument("--minutes", type=float, default=30, help="stop by then, wherever it is")
        part.add_argument("--seed", type=int, default=0)
        part.add_argument("--only", nargs="+", choices=list(module.CASES), default=list(module.CASES), metavar="CASE")
        part.add_argument("--work", type=Path, help="keep run folders and output here, to look at afterwards")
        module.add_arguments(part)
        part.set_defaults(measure=module.measure)
    args = parser.parse_args()
    about, end = report.metadata(), time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        work = (args.work or Path(scratch)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        # what is written is signed by a key of its own
        os.environ |= {"XDG_CONFIG_HOME": str(work / "key"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        found = args.measure(args, work, end)
    about |= {"load_after": report.load(), "seed": args.seed}
    names = list(dict.fromkeys(name for case in found.values() for name in case if isinstance(case[name], int)))
    rows = [(name, *(case.get(each, 0) for each in names), len(case["bad"])) for name, case in found.items()]
    print(report.table([("case", *names, "bad"), *rows]))
    print("in all", dict(keep(args.part, about, found)))
    return 1 if any(case["bad"] for case in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
