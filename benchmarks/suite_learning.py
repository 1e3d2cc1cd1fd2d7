"""Does PPO learn the tasks of the suite, and in how many steps and minutes?

    python benchmarks/suite_learning.py lift_d0 --seed 0
    python benchmarks/suite_learning.py push_d0_images --seed 1 --minutes 20      # repeat the command to resume
    python benchmarks/suite_learning.py --summary

One process trains one seed on one thread, so two seeds can run in parallel on two cores. The greedy policy regularly
plays 200 held-out episodes; that time does not count as training. An interrupted run resumes from its last checkpoint
(one per evaluation) in benchmarks/runs/; each call stores its curve in results/suite_learning.json.
The settings are in configs/, so `sparring train finetune --config configs/lift_d2.yaml` repeats a run.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import report

CONFIGS = Path(__file__).parents[1] / "configs"
RUNS = Path(__file__).parent / "runs"
RESULTS = report.RESULTS / "suite_learning.json"
EPISODES = 200


@dataclass(frozen=True)
class Problem:
    """A config and its target, if any: success within env steps and minutes of training."""

    config: str
    evaluate_every: int
    success: float | None = None
    steps: int | None = None
    minutes: float | None = None


PROBLEMS = {
    "lift_d0": Problem("lift_d0.yaml", 50_000, 0.95, 300_000),
    "lift_d2": Problem("lift_d2.yaml", 250_000, 0.95, 1_500_000, 15),
    "stack_d0": Problem("stack_d0.yaml", 250_000),
    "push_d0_images": Problem("push_d0_images.yaml", 50_000, 0.80, 500_000, 30),
}


def train(name: str, seed: int, minutes: float, changes: list[str], folder: Path) -> dict:
    """Train until the last step of the config or until `minutes` are over; return the record so far."""
    import torch

    from sparring.config.schema import load_config
    from sparring.config.text import parse_overrides
    from sparring.runs.run import Run

    torch.set_num_threads(1)
    problem = PROBLEMS[name]
    fixed = [f"seed={seed}", "threads=1", "env.threads=1", f"output={folder}"]
    config = load_config(CONFIGS / problem.config, parse_overrides([*fixed, *changes]))
    run = Run(config, quiet=True)
    log = folder / "judged.json"
    record = json.loads(log.read_text()) if log.is_file() else {"seconds": 0.0, "curve": []}
    if not record["curve"]:
        record["curve"].append({"steps": 0, "seconds": 0.0} | judge(run, config))
    progress, deadline = run.phase.progress, time.time() + 60 * minutes
    while run.fraction < 1 and time.time() < deadline:
        started = time.perf_counter()
        run.phase.step(run.fraction)
        record["seconds"] += time.perf_counter() - started
        due = record["curve"][-1]["steps"] // problem.evaluate_every + 1
        if progress.env_steps >= due * problem.evaluate_every or run.fraction >= 1:
            point = {"steps": progress.env_steps, "seconds": round(record["seconds"], 1)} | judge(run, config)
            record["curve"].append(point)
            print(f"{name} seed {seed}: {point}", flush=True)
            run.save()
            report.write_json(log, record)
    run.save()
    report.write_json(log, record)
    about = {"problem": name, "seed": seed, "commit": report.commit(), "cpu": report.cpu_model()}
    return about | {"steps": progress.env_steps, "done": run.fraction >= 1} | record


def judge(run, config) -> dict:
    """Results of the greedy policy on held-out episodes, the same at each call."""
    from sparring.envs.env import make_env
    from sparring.evaluation.play import play, wilson

    env = make_env(config.env, num_envs=50, device=run.distributed.device)
    episodes, _ = play(run.phase.policy, env, EPISODES, config.seed)
    env.close()
    rate = wilson(sum(episode.success for episode in episodes), EPISODES)
    reward = statistics.fmean(episode.reward for episode in episodes)
    return {"success": rate.rate, "low": round(rate.low, 4), "high": round(rate.high, 4), "reward": round(reward, 2)}


def summary(runs: dict[str, dict]) -> str:
    rows = [
        ("problem", "seeds", "steps", "minutes", "success of each seed (200 episodes)", "first at target", "target")
    ]
    for name, problem in PROBLEMS.items():
        mine = [run for run in runs.values() if run["problem"] == name]
        if mine:
            finals = ", ".join(report.rate_in_words(run["curve"][-1]) for run in mine)
            minutes = statistics.median(run["seconds"] for run in mine) / 60
            rows.append((name, len(mine), f"{mine[0]['steps']:,}", f"{minutes:.1f}", finals, *_reached(problem, mine)))
    return report.table(rows)


def _reached(problem: Problem, runs: list[dict]) -> tuple[str, str]:
    """(steps at which each seed first passed, whether three or more seeds all pass at the last timely evaluation)."""
    if problem.success is None:
        return "-", "none"
    firsts = [next((p["steps"] for p in run["curve"] if p["success"] >= problem.success), None) for run in runs]
    minutes = problem.minutes or float("inf")
    within = [[p for p in run["curve"] if p["steps"] <= problem.steps and p["seconds"] <= 60 * minutes] for run in runs]
    met = len(runs) >= 3 and all(points[-1]["success"] >= problem.success for points in within)
    text = ", ".join("never" if first is None else f"{first:,}" for first in firsts)
    return text, f"{problem.success:.0%} {'met' if met else 'MISSED'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", nargs="?", choices=PROBLEMS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after this; repeat the command to resume")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="try other settings; not stored")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the checkpoints")
    parser.add_argument("--summary", action="store_true", help="only print the stored results")
    args = parser.parse_args()
    if args.problem and not args.summary:
        folder = args.runs / "_".join([args.problem, f"seed{args.seed}", *args.set])
        outcome = train(args.problem, args.seed, args.minutes, args.set, folder)
        print(f"{args.problem} seed {args.seed}: {outcome['steps']:,} steps, checkpoint in {folder}")
        if not args.set:
            report.keep_run(RESULTS, RUNS, outcome)
    if not RESULTS.is_file():
        print(f"no results yet: the first run writes {RESULTS.name}")
    else:
        print(summary(json.loads(RESULTS.read_text())["runs"]))


if __name__ == "__main__":
    main()
