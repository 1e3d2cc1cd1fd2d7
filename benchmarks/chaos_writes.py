"""If one system call that writes to a run folder fails, does an intact checkpoint remain, and can the run continue?

Calls: open, write, truncate, fsync, rename, mkdir, unlink, symlink, by libraries and by Python. Each call in turn fails
with EIO; fails with ENOSPC, as do all later calls that need space; writes half (short); or is not made (kill) or writes
half (torn) before the process is killed. Then the previous or the new checkpoint must be intact, a failed command must
have printed a one-line error, and the same command must end like an undisturbed run.

A library compiled here (tests/doubles/write_faults.c) intercepts the calls: nothing is measured without a compiler.
System calls of safetensors that do not use libc are not intercepted: it renames weights files.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "doubles"))
from chaos_corruption import preload  # noqa: E402
from chaos_kills import ROWS, SPARRING, rows, weights  # noqa: E402
from write_faults import KINDS, Point, build, points_of, run  # noqa: E402

QUICK = ["device=cpu", "threads=1", "rollout.render_episodes=0", "evaluation.episodes=2", "evaluation.baseline=false"]
QUICK += ["training.save_every=2", "training.keep_checkpoints=1"]
CARTPOLE = ["train", "finetune", *QUICK, "env.name=gym:CartPole-v1", "rollout.n_envs=2", "rollout.steps=16"]
CARTPOLE += ["policy.hidden=[8]", "ppo.mini_batch_size=16", "ppo.ppo_epochs=1"]
# with twice the iterations, these commands save once more
CASES = {"finetune": CARTPOLE, "teacher": ["train", "teacher", *SPARRING, "training.keep_checkpoints=1"]}
BAD = ("silent", "neither", "damaged", "traceback", "hang", "died", "no way on", "other end")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--share", nargs=2, type=int, default=(0, 1), metavar=("I", "N"), help="each N-th trial from I")


def trials(name: str, args: argparse.Namespace, work: Path) -> Iterator[dict]:
    """Trials of a process with the preloaded library, see `main`."""
    library = build(work)
    if library is None:
        print("no C compiler (gcc), or no Linux: nothing is measured")
        return
    words = [sys.executable, __file__, name, str(work), str(args.seed), *map(str, args.share), *args.kinds]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = os.environ | {"LD_PRELOAD": str(library)}
    with subprocess.Popen(words, env=environment, text=True, bufsize=1, **pipes) as process:
        about = json.loads(process.stdout.readline())
        for _ in range(about["of"]):
            process.stdin.write("\n")
            yield json.loads(process.stdout.readline()) | about
    if process.returncode:
        raise SystemExit(f"{name}: {process.returncode}")


def summary(trials: list[dict]) -> dict:
    counts = Counter(trial["kind"] for trial in trials)
    about = {name: trials[-1][name] for name in ("points", "points of the checkpoint") if trials}
    return about | counts | {"left": dict(Counter(trial["left"] for trial in trials))}


class FaultyRun:
    """A run that resumes, trains and saves; each trial repeats it with one fault."""

    def __init__(self, case: str, work: Path):
        self.before, self.folder = work / f"{case}-before", work / f"{case}-run"
        half = [*CASES[case], "training.iterations=2", "--output", str(self.folder)]
        self.words = [*CASES[case], "training.iterations=4", "--output", str(self.folder)]
        for path in (self.before, self.folder):
            shutil.rmtree(path, ignore_errors=True)
        code, text = run(half, self.folder)
        if code:
            raise SystemExit(f"sparring {' '.join(half)}: {code}\n{text}")
        shutil.copytree(self.folder, self.before)
        self.points = points_of(self.words, self.folder)
        self.end = self.found()

    def found(self) -> tuple:
        return weights(self.folder), [rows(self.folder / name) for name in ROWS]

    def strike(self, point: Point, kind: str) -> dict:
        """Run with one fault, then again without; return the verdict and the checkpoints between the two."""
        from sparring.runs.checkpoint import CheckpointError, checkpoints, damage_of, newest_whole

        shutil.rmtree(self.folder)
        shutil.copytree(self.before, self.folder)
        code, text = run(self.words, self.folder, point=point, kind=kind)
        left = [path.name for path in checkpoints(self.folder)]
        found = {"kind": kind, **point._asdict(), "code": code, "left": " ".join(left)}
        try:
            if newest_whole(self.folder) is None:
                return found | {"verdict": "neither"}
        except CheckpointError:
            return found | {"verdict": "neither"}
        if any(damage_of(self.folder / name) for name in left):
            return found | {"verdict": "damaged"}
        if wrong := _bad_verdict(code, text, kind):
            return found | {"verdict": wrong, "output": text[-1500:]}
        code, text = run(self.words, self.folder)
        if code or "Traceback" in text:
            return found | {"verdict": "no way on", "output": text[-1500:]}
        if self.found() != self.end:
            return found | {"verdict": "other end", "output": text[-1500:]}
        return found | {"verdict": "killed" if found["code"] == -9 else "ended" if found["code"] else "went on"}


def _bad_verdict(code: int | None, text: str, kind: str) -> str | None:
    if code is None:
        return "hang"
    if "Traceback" in text:
        return "traceback"
    if code < 0 and (code, kind) not in ((-9, "kill"), (-9, "torn")):
        return "died"
    return "silent" if code and code > 0 and "sparring: " not in text else None


def main() -> None:
    """Run one trial for each line on stdin; print each as a line of JSON."""
    case, work, seed, first, shares, *kinds = sys.argv[1:]
    preload()
    faulty = FaultyRun(case, Path(work))
    # threads write in any order; each share must plan the same trials
    points = sorted(faulty.points)
    # in random order, so that an interrupted case is a random sample
    random.Random(seed).shuffle(points)
    # calls that write a checkpoint come first
    points.sort(key=lambda point: "checkpoint" not in point.path)
    planned = [(point, kind) for point in points for kind in filter(point.fits, kinds)]
    planned = planned[int(first) :: int(shares)]
    saves = sum("checkpoint" in point.path for point in points)
    print(json.dumps({"points": len(points), "points of the checkpoint": saves, "of": len(planned)}), flush=True)
    for (point, kind), _ in zip(planned, sys.stdin, strict=False):
        print(json.dumps(faulty.strike(point, kind)), flush=True)


if __name__ == "__main__":
    main()
