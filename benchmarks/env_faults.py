"""Whatever an env does, does a run end soon, with a sentence, and with nothing left?

    python benchmarks/env_faults.py
    python benchmarks/env_faults.py --only "hang in step" child     # measured again; the others are kept

Each fault of tests/doubles/faulty_envs.py (20, and variants of them) strikes in a real `sparring train finetune`: in
the process that learns (sync), in two worker processes (workers), and in the collecting process (async).
`rollout.watchdog_s` is 3; what an env does for the first time may take ten times as long. Of each run are kept:

- how it ended: its exit code, and what it said last (where an env ends the process that learns, its guard says it)
- the seconds from the fault until the command had ended; 90 s without an end count as a hang
- whether a traceback was shown, but for that of the env's own code, which stands below our sentence
- what was left: processes, and files in /dev/shm

Results: results/env_faults.json.
"""

import argparse
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import report

RESULTS = report.RESULTS / "env_faults.json"
DOUBLES = Path(__file__).parents[1] / "tests" / "doubles"
sys.path.append(str(DOUBLES))
from faulty_envs import FAULTS, VARIANTS  # noqa: E402

HANG_S, LEFT_S, MARK = 90.0, 6.0, "ENV_FAULTS_RUN"
WORDS = ["train", "finetune", "env.name=faulty_envs:Faulty", "--envs", "2", "rollout.steps=8", "rollout.watchdog_s=3"]
WORDS += ["training.iterations=8", "ppo.mini_batch_size=8", "ppo.ppo_epochs=1", "policy.hidden=[8]", "threads=1"]
WORDS += ["device=cpu", "evaluation.episodes=2", "evaluation.baseline=false", "rollout.render_episodes=1"]
MODES = {"sync": [], "workers": ["env.vectorize=process", "env.workers=2"], "async": ["rollout.mode=async"]}
# a traceback of ours: not indented below a sentence of ours, and not of the env's code
OURS = re.compile(r"^Traceback \(most recent call last\)", re.M)


def strike(how: str, mode: str) -> dict:
    """A run in which it happens: how that ended."""
    mark = uuid.uuid4().hex
    path = os.pathsep.join([str(DOUBLES), *filter(None, sys.path)])
    with tempfile.TemporaryDirectory() as place:
        since = Path(place) / "since"
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FAULTY_SINCE": str(since), MARK: mark}
        words = [sys.executable, "-m", "sparring", *WORDS, *MODES[mode], f"env.kwargs.how={how}"]
        shared = set(os.listdir("/dev/shm"))
        with open(Path(place) / "said", "w+") as said:
            command = [*words, "--output", str(Path(place) / "run")]
            process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
            began = time.time()
            while process.poll() is None and time.time() - (_since(since) or began) < HANG_S:
                time.sleep(0.02)
            seconds = time.time() - (_since(since) or began)
            if hung := process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            # what outlives the command may have something to say
            left = _left(mark)
            said.seek(0)
            text = said.read()
        saved = sorted(path.name for path in (Path(place) / "run").glob("checkpoint-*"))
        files = [name for name in set(os.listdir("/dev/shm")) - shared if "sparring" in name and _is_nobodys(name)]
    sentences = [line for line in text.splitlines() if line.startswith("sparring: ")]
    told = code in (0, 130) or len(sentences) == 1
    # what follows our sentence is the env's
    traceback = bool(OURS.search(("\n" + text).partition("\nsparring: ")[0]))
    # of an env that ends the process that learns; its guard reports it
    died = mode == "sync" and how in ("exit", "kill", "segfault", "hang in C with the lock")
    found = {"exit_code": code, "seconds": round(seconds, 2), "hung": hung, "told": told, "traceback": traceback}
    found |= {"left": [*left, *files], "saved": saved, "says": (sentences or text.splitlines() or [""])[-1][:200]}
    found["fine"] = not (hung or traceback or left or files) and told and (died or code in (0, 1, 2, 130))
    return found


def _since(file: Path) -> float | None:
    return file.stat().st_mtime if file.exists() else None


def _is_nobodys(name: str) -> bool:
    """Whoever uses shared memory holds the lock of its file; other runs of this machine do, too."""
    try:
        with open(f"/dev/shm/{name}") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _left(mark: str) -> list[str]:
    """Commands of the processes that are still there some seconds later; they are killed."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = [*FAULTS, *VARIANTS]
    parser.add_argument("--only", nargs="+", choices=everything, metavar="FAULT", help=f"of {', '.join(everything)}")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    args = parser.parse_args()
    kept = json.loads(RESULTS.read_text())["faults"] if RESULTS.is_file() else {}
    for how in args.only or everything:
        for mode in args.modes:
            found = strike(how, mode) | {"commit": report.commit(), "load": report.load()}
            kept.setdefault(how, {})[mode] = found
            print(how, mode, found, flush=True)
            rows = [row for modes in kept.values() for row in modes.values()]
            total = {"runs": len(rows), "fine": sum(row["fine"] for row in rows)}
            total |= {"hung": sum(row["hung"] for row in rows), "worst_seconds": max(row["seconds"] for row in rows)}
            total |= {"tracebacks": sum(row["traceback"] for row in rows), "left": sum(bool(r["left"]) for r in rows)}
            report.write_json(RESULTS, {"about": report.metadata(), "total": total, "faults": kept})
    columns = ["fine", "exit_code", "seconds", "says"]
    rows = [(how, mode, *(row[c] for c in columns)) for how, modes in kept.items() for mode, row in modes.items()]
    print(report.table([("fault", "mode", *columns), *rows]))


if __name__ == "__main__":
    main()
