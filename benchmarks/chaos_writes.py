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
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "doubles"))
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


def measure(args: argparse.Namespace, work: Path, end: float) -> dict:
    library = build(work)
    if library is None:
        print("no C compiler (gcc), or no Linux: nothing is measured")
        return {}
    environment, found = os.environ | {"LD_PRELOAD": str(library)}, {}
    for i, name in enumerate(args.only):
        seconds = (end - time.monotonic()) / (len(args.only) - i)
        words = [sys.executable, __file__, name, str(work), str(args.seed), str(seconds), "0", *args.kinds]
        trials = []
        with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                trials.append(json.loads(line))
                if trials[-1].get("verdict") in BAD:
                    print(name, line.strip(), flush=True)
        if process.returncode:
            raise SystemExit(f"{name}: {process.returncode}")
        about = trials.pop(0)
        counts = Counter(trial["kind"] for trial in trials) + Counter(trial["verdict"] for trial in trials)
        found[name] = {**about, "trials": len(trials), **counts}
        found[name]["left"] = dict(Counter(trial["left"] for trial in trials))
        found[name]["bad"] = [trial for trial in trials if trial["verdict"] in BAD]
    return found


class Injected:
    """A run that is about to save, and what comes of it when that goes wrong."""

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
        """How it ended, what was left, and what came of going on."""
        from sparring.runs.checkpoint import CheckpointError, checkpoints, damage_of, newest_whole

        shutil.rmtree(self.folder)
        shutil.copytree(self.before, self.folder)
        code, text = run(self.words, self.folder, point=point, kind=kind)
        left = [path.name for path in checkpoints(self.folder)]
        told = {"kind": kind, **point._asdict(), "code": code, "left": " ".join(left)}
        try:
            if newest_whole(self.folder) is None:
                return told | {"verdict": "neither"}
        except CheckpointError:
            return told | {"verdict": "neither"}
        if any(damage_of(self.folder / name) for name in left):
            return told | {"verdict": "damaged"}
        if wrong := _wrong(code, text, kind):
            return told | {"verdict": wrong, "said": text[-1500:]}
        code, text = run(self.words, self.folder)
        if code or "Traceback" in text:
            return told | {"verdict": "no way on", "said": text[-1500:]}
        if self.found() != self.end:
            return told | {"verdict": "other end", "said": text[-1500:]}
        return told | {"verdict": "killed" if told["code"] == -9 else "ended" if told["code"] else "went on"}


def _wrong(code: int | None, text: str, kind: str) -> str | None:
    if code is None:
        return "hang"
    if "Traceback" in text:
        return "traceback"
    if code < 0 and (code, kind) not in ((-9, "kill"), (-9, "torn")):
        return "died"
    return "silent" if code and code > 0 and "sparring: " not in text else None


def trials(injected: Injected, points: Iterable[Point], kinds: Iterable[str], end: float) -> Iterator[dict]:
    for point in points:
        for kind in filter(point.fits, kinds):
            if time.monotonic() > end:
                return
            yield injected.strike(point, kind)


def preload() -> None:
    """So that a fork takes tenths of a second."""
    import torch

    import sparring.cli.train
    import sparring.evaluation.of_run
    import sparring.phases.finetune
    import sparring.phases.teacher
    import sparring.runs.run  # noqa: F401

    torch.set_num_threads(1)


def main() -> None:
    """In a process that was started with the library: a line of JSON for each trial."""
    case, work, seed, seconds, most, *kinds = sys.argv[1:]
    end = time.monotonic() + float(seconds)
    preload()
    injected = Injected(case, Path(work))
    points = list(injected.points)
    # if there is no time for all, any of them
    random.Random(seed).shuffle(points)
    # what makes a checkpoint comes first
    points.sort(key=lambda point: "checkpoint" not in point.path)
    saves = sum("checkpoint" in point.path for point in points)
    print(json.dumps({"points": len(points), "points of the checkpoint": saves}), flush=True)
    # 0: all of them
    for told in trials(injected, points[: int(most) or None], kinds, end):
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
