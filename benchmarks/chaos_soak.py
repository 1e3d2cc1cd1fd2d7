"""Do memory, open files or threads of an endless run grow?

The runs are tiny `sparring train finetune` of `reach_d0`, so that an hour has as many updates, checkpoints, evaluations
and videos as a day of a real run: in one process (sync), with an actor process (async), and in one process with a
single malloc arena. They share the minutes; a quarter of each run, at most two minutes, is warm-up. The resident memory
of all processes is read every second. Stored for each process that lived throughout:

- the slope after warm-up, by least squares over means of 20 s, with its standard error: neighbouring samples are not
  independent, such means nearly are
- memory at the beginning, after warm-up and at the end; open files and threads after warm-up and at the end
- the largest steps between two means, and when: a single allocation is a step, a leak is a slope

and for the run its numbers of updates, checkpoints and videos, and the peak memory of its video encoders. `grows` is
bad: all means of the last third exceed all of the first third by more than 30 MB (glibc's heaps of threads, which come
and go), or by 2 MB with one arena; or there are more than four additional open files or threads.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

EVERY_S, MEAN_S = 1.0, 20.0
MB = 1e6
WORDS = ["train", "finetune", "env.task=reach_d0", "--envs", "4", "rollout.steps=16", "rollout.max_episode_steps=20"]
WORDS += [
    "policy.hidden=[16]",
    "ppo.mini_batch_size=32",
    "ppo.ppo_epochs=1",
    "threads=1",
    "env.threads=1",
    "device=cpu",
]
WORDS += [
    "training.iterations=100000000",
    "training.save_every=50",
    "logging.video_share=1",
    "rollout.render_episodes=1",
]
WORDS += ["evaluation.every=200", "evaluation.episodes=4", "evaluation.baseline=false"]


@dataclass(frozen=True)
class Mode:
    settings: list[str]
    environment: dict[str, str]
    # allowed growth of a process
    mb: float


# without arenas for threads, growth is the program's own
CASES = {"sync": Mode([], {}, 30), "async": Mode(["rollout.mode=async"], {}, 30)}
CASES["sync, one arena"] = Mode([], {"MALLOC_ARENA_MAX": "1"}, 2)
BAD = ("grows",)
FEW = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--settings", nargs="*", default=[], metavar="KEY=VALUE", help="more settings for the runs")


def trials(name: str, args: argparse.Namespace, work: Path) -> Iterator[dict]:
    seconds = 60 * args.minutes / len(args.only)
    warm_s = min(120.0, seconds / 4)
    found = soak(CASES[name], args.settings, warm_s, seconds - warm_s, work / name)
    rows = found["processes"]
    grows = any(row["grown_mb"] > CASES[name].mb for row in rows)
    grows |= any(row[what][1] > row[what][0] + FEW for row in rows for what in ("open_files", "threads"))
    yield {"verdict": "grows" if grows else "flat", **found, "of": 1}


def summary(trials: list[dict]) -> dict:
    return {key: value for trial in trials for key, value in trial.items() if key not in ("verdict", "of", "seconds")}


def soak(mode: Mode, settings: list[str], warm_s: float, measured_s: float, work: Path) -> dict:
    work.mkdir()
    folder = work / "run"
    command = [sys.executable, "-m", "sparring", *WORDS, *mode.settings, *settings, "--output", str(folder)]
    with open(work / "output", "w") as output:
        environment = os.environ | mode.environment
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        # excludes imports and compilation: begins at the first update
        while not (folder / "episode_metrics.jsonl").is_file() and process.poll() is None:
            time.sleep(0.2)
        at_first = count_outputs(folder)
        samples, encoders_mb = sample_processes(process, warm_s + measured_s)
        at_last = count_outputs(folder)
    finally:
        code = stop(process)
    if code != 130:
        raise SystemExit(f"the run ended with {code}:\n{(work / 'output').read_text()[-2000:]}")
    rows = [figures_of(name, np.array(seen), warm_s) for name, seen in samples.items()]
    made = {name: at_last[name] - at_first[name] for name in at_last}
    return {
        "warm_up_s": warm_s,
        "measured_s": measured_s,
        "made": made,
        "processes": rows,
        "most_of_encoders_mb": encoders_mb,
    }


def sample_processes(process: subprocess.Popen, seconds: float) -> tuple[dict[str, list], float]:
    """Samples (second, bytes, open files, threads) of each long-lived process, and the peak MB of all encoders."""
    began, found, encoders_mb = time.monotonic(), defaultdict[psutil.Process, list](list), 0.0
    while (at := time.monotonic() - began) < seconds and process.poll() is None:
        others = 0
        main = psutil.Process(process.pid)
        for each in [main, *main.children(recursive=True)]:
            with suppress(psutil.Error), each.oneshot():
                rss = each.memory_info().rss
                found[each].append((at, rss, each.num_fds(), each.num_threads()))
                others += rss if each.name().startswith("ffmpeg") else 0
        encoders_mb = max(encoders_mb, others / MB)
        time.sleep(EVERY_S)
    most = max(map(len, found.values()))
    long_lived = [seen for seen in found.values() if len(seen) > 0.9 * most]
    names = ["learner", *(f"process {i}" for i in range(1, len(long_lived)))]
    return dict(zip(names, long_lived, strict=True)), round(encoders_mb, 1)


def figures_of(name: str, seen: np.ndarray, warm_s: float) -> dict:
    """Figures of one process: slope in MB/h with its standard error, growth, largest steps."""
    warm = seen[seen[:, 0] >= warm_s]
    # at least six means
    mean_s = min(MEAN_S, (seen[-1, 0] - warm_s) / 6)
    blocks = [warm[(warm[:, 0] // mean_s) == b] for b in np.unique(warm[:, 0] // mean_s)]
    hours = np.array([block[:, 0].mean() / 3600 for block in blocks])
    size = np.array([block[:, 1].mean() / MB for block in blocks])
    centred = hours - hours.mean()
    slope = float((centred * size).sum() / (centred**2).sum())
    residuals = size - size.mean() - slope * centred
    error = float(np.sqrt((residuals**2).sum() / (len(size) - 2) / (centred**2).sum()))
    steps = sorted(zip(np.diff(size), hours[1:] * 3600, strict=True), key=lambda step: -abs(step[0]))[:3]
    return {
        "process": name,
        "slope_mb_per_h": round(slope, 2),
        "standard_error": round(error, 2),
        "grown_mb": round(float(size[-(len(size) // 3) :].min() - size[: len(size) // 3].max()), 2),
        "mb": {"first": mb(seen[0, 1]), "warm": mb(warm[0, 1]), "last": mb(seen[-1, 1]), "most": mb(seen[:, 1].max())},
        "open_files": [int(warm[0, 2]), int(warm[-1, 2])],
        "threads": [int(warm[0, 3]), int(warm[-1, 3])],
        "largest_steps": [{"mb": round(float(by), 2), "at_s": round(float(at))} for by, at in steps],
        "means_mb": [round(float(x), 2) for x in size],
    }


def mb(size: float) -> float:
    return round(float(size) / MB, 1)


def count_outputs(folder: Path) -> dict[str, int]:
    updates = json.loads((folder / "status.json").read_text())["progress"]["updates"]
    checkpoints = [int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*")]
    index = folder / "videos" / "index.jsonl"
    videos = len(index.read_text().splitlines()) if index.is_file() else 0
    return {"updates": updates, "checkpoints": max(checkpoints, default=0) // 50, "videos": videos}


def stop(process: subprocess.Popen) -> int:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()
