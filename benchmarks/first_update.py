"""Does a first rollout that only fits the normalisers improve learning enough to justify its env steps?

    python benchmarks/first_update.py OLD NEW --seeds 5 --jobs 2
    python benchmarks/first_update.py --summary

OLD and NEW are folders of checkouts: OLD fits normalisers after the first update, NEW to a rollout before it. Both
train the problems below with equal settings and seeds; the greedy policy is evaluated on the same held-out episodes at
equal numbers of updates. All env steps count, including those of the rollout that fits normalisers. For each problem:

- `steps`: env steps at the first evaluation that passes the threshold; the limit if none does
- `mean`: mean over all evaluations of success (CartPole: of reward / 500), the area under the learning curve
- `value_loss`: loss of the critic in update 2 over that in update 1

Finished runs are stored in results/first_update.json and skipped the next time. An interrupted run starts from scratch.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import report

RESULTS = report.RESULTS / "first_update.json"
CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True)
class Problem:
    settings: str
    limit: int  # env steps
    measure: str  # in evaluations.jsonl
    scale: float
    passes: float


PROBLEMS = {
    "reach_d0": Problem(
        "env.task=reach_d0 evaluation.every=6 evaluation.episodes=100", 150_000, "eval/success_rate", 1.0, 0.9
    ),
    "lift_d0": Problem(
        f"--config {CONFIGS / 'lift_d0.yaml'} evaluation.every=10 evaluation.episodes=100",
        300_000,
        "eval/success_rate",
        1.0,
        0.95,
    ),
    "cartpole": Problem(
        f"--config {CONFIGS / 'cartpole.yaml'} policy.normalize_observations=true evaluation.every=16 "
        "evaluation.episodes=20",
        100_000,
        "eval/reward",
        500.0,
        0.95,
    ),
}


def train(name: str, source: Path, seed: int) -> dict:
    """Train in a new process, on one thread."""
    problem = PROBLEMS[name]
    with tempfile.TemporaryDirectory(prefix="first_update_") as folder:
        output = Path(folder) / "run"
        words = ["train", "finetune", *problem.settings.split(), f"seed={seed}", "threads=1", "device=cpu"]
        words += [f"training.total_timesteps={problem.limit}", "training.log_every=1", "evaluation.baseline=false"]
        words += ["rollout.render_episodes=0", "logging.console_level=ERROR", f"output={output}"]
        words += [] if name == "cartpole" else ["env.threads=1"]
        path = os.pathsep.join(filter(None, (str(source / "src"), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        program = [sys.executable, "-m", "sparring", *words]
        done = subprocess.run(program, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name}, seed {seed}, {source}:\n{done.stderr[-2000:]}")
        evaluations = [json.loads(line) for line in (output / "evaluations.jsonl").read_text().splitlines()]
        losses = [json.loads(line)["train/value_loss"] for line in _first_lines(output / "episode_metrics.jsonl", 2)]
    curve = [(line["total_steps"], line[problem.measure] / problem.scale) for line in evaluations]
    passed = [steps for steps, value in curve if value >= problem.passes]
    return {
        "steps": min(passed, default=problem.limit),
        "passed": bool(passed),
        "mean": statistics.fmean(value for _, value in curve),
        "value_loss": losses[1] / losses[0],
        "curve": curve,
    }


def _first_lines(file: Path, lines: int) -> list[str]:
    return file.read_text().splitlines()[:lines]


def summarise(runs: dict[str, dict]) -> str:
    rows = [("problem", "normalisers fitted", "seeds", "steps, median (all)", "mean of the curve", "value loss 2 : 1")]
    for name in PROBLEMS:
        for side, when in (("old", "after update 1"), ("new", "before update 1")):
            found = [run for key, run in sorted(runs.items()) if key.startswith(f"{name}/{side}/")]
            if not found:
                continue
            steps = [run["steps"] for run in found]
            shown = ", ".join(f"{s / 1000:.0f}k" if run["passed"] else "-" for s, run in zip(steps, found, strict=True))
            means = [run["mean"] for run in found]
            spread = statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else float("nan")
            loss = statistics.median(run["value_loss"] for run in found)
            median = f"{statistics.median(steps) / 1000:.0f}k ({shown})"
            area = f"{statistics.fmean(means):.3f} +- {spread:.3f}"
            rows.append((name, when, str(len(found)), median, area, f"{loss:.2f}"))
    return report.table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", type=Path, help="checkout that fits normalisers after the first update")
    parser.add_argument("new", nargs="?", type=Path, help="checkout that fits them before it")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--summary", action="store_true", help="only print the stored results")
    arguments = parser.parse_args()
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}}
    if not arguments.summary:
        if arguments.old is None or arguments.new is None:
            parser.error("give the folders of both checkouts, or --summary")
        sides = {"old": arguments.old, "new": arguments.new}
        stored["about"] = report.metadata()
        with ThreadPoolExecutor(arguments.jobs) as pool:
            futures = {
                f"{name}/{side}/{seed}": pool.submit(train, name, source.resolve(), seed)
                for name in arguments.only
                for seed in range(arguments.seeds)
                for side, source in sides.items()
                if f"{name}/{side}/{seed}" not in stored["runs"]
            }
            for key, future in futures.items():
                stored["runs"][key] = future.result()
                report.write_json(RESULTS, stored)
                print(key, {name: value for name, value in stored["runs"][key].items() if name != "curve"}, flush=True)
    print(summarise(stored["runs"]))


if __name__ == "__main__":
    main()
