"""Each call that writes below a run folder while it goes on, saves and ends goes wrong once: what is left of the run?

Calls: open, write, truncate, fsync, rename, mkdir, unlink, symlink, by libraries as by Python. Each of them fails with
EIO; fails with ENOSPC, as does all that needs space after it; writes half (short); is never made, because the process
is killed; or writes half and is killed (torn). Afterwards the folder must hold the checkpoint before or the new one,
whole; what failed must have ended with a sentence, or gone on; and the same command, with space again, must end as if
nothing had happened: the same weights, the same rows.

The calls are met by a library that is compiled here (tests/doubles/write_faults.c): without a compiler nothing is
measured. What safetensors asks of the kernel without libc is not met: it renames a file of weights to its name.
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
# commands that save once more when they are given twice as long
CASES = {"finetune": CARTPOLE, "teacher": ["train", "teacher", *SPARRING, "training.keep_checkpoints=1"]}
BAD = ("silent", "neither", "damaged", "traceback", "hang", "died", "no way on", "other end")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument(
        "--share", nargs=2, type=int, default=(0, 1), metavar=("I", "N"), help="every N-th trial from I"
    )


def trials(name: str, args: argparse.Namespace, work: Path) -> Iterator[dict]:
    """From a process that was started with the library: `main` below."""
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


class Injected:
    """A run that is about to save, and how it ends when that goes wrong."""

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
        """How it ended, what was left, and how the same command ended after it."""
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
        if wrong := _wrong(code, text, kind):
            return found | {"verdict": wrong, "output": text[-1500:]}
        code, text = run(self.words, self.folder)
        if code or "Traceback" in text:
            return found | {"verdict": "no way on", "output": text[-1500:]}
        if self.found() != self.end:
            return found | {"verdict": "other end", "output": text[-1500:]}
        return found | {"verdict": "killed" if found["code"] == -9 else "ended" if found["code"] else "went on"}


def _wrong(code: int | None, text: str, kind: str) -> str | None:
    if code is None:
        return "hang"
    if "Traceback" in text:
        return "traceback"
    if code < 0 and (code, kind) not in ((-9, "kill"), (-9, "torn")):
        return "died"
    return "silent" if code and code > 0 and "sparring: " not in text else None


def main() -> None:
    """One trial, a line of JSON, for each line that is read."""
    case, work, seed, first, shares, *kinds = sys.argv[1:]
    preload()
    injected = Injected(case, Path(work))
    # threads write in any order; each share must plan the same trials
    points = sorted(injected.points)
    # if there is no time for all, any of them
    random.Random(seed).shuffle(points)
    # what makes a checkpoint comes first
    points.sort(key=lambda point: "checkpoint" not in point.path)
    planned = [(point, kind) for point in points for kind in filter(point.fits, kinds)]
    planned = planned[int(first) :: int(shares)]
    saves = sum("checkpoint" in point.path for point in points)
    print(json.dumps({"points": len(points), "points of the checkpoint": saves, "of": len(planned)}), flush=True)
    for (point, kind), _ in zip(planned, sys.stdin, strict=False):
        print(json.dumps(injected.strike(point, kind)), flush=True)


if __name__ == "__main__":
    main()
