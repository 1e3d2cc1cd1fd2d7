"""If rollouts are four policy versions old, is learning without an off-policy correction worse than with one?

    python benchmarks/async_stale.py none --seed 0
    python benchmarks/async_stale.py decoupled --seed 1 --minutes 5      # repeat the command to resume
    python benchmarks/async_stale.py none decoupled --clip 0.1 0.2 --staleness 1 4 --seed 0 1 2 3 4
    python benchmarks/async_stale.py --summary

`reach_d0` from state with `rollout.mode=async rollout.staleness=4`, compared with synchronous collection (sync). All
runs have the same settings (`SETTINGS`) except `ppo.correction`, and `rollout.least_ess=0` lets robots collect without
waiting. The learner sleeps between updates until it is slower than the robots, so that rollouts really are four
versions old: a run whose mean staleness, from the sixth update on, is below 3.5 is not stored. The greedy policy is
evaluated every 5,000 steps on 50 held-out episodes, and at the end on 200. `--clip` and `--staleness` repeat the
comparison with other values.

The settings were chosen with seed 100, which is not counted, then run with seeds 0, 1 and 2 (0 to 4 for the default).
Trials with seed 100, greedy success at the end:

| task and settings | sync | none | truncated | decoupled | vtrace |
| --- | --- | --- | --- | --- | --- |
| CartPole, lr 3e-3, minibatches of 64, 20 epochs, 40,000 steps | 32 % | 85 % | | fell to 0 % by 20,000, stopped | |
| CartPole, lr 1e-3, minibatches of 256, 20 epochs, 30,000 steps | 100 % | up and down, stopped | | | |
| reach_d0, lr 1e-3, 10 epochs, clip 0.2, 60,000 steps | 100 % | 100 % | | 64 % | |
| reach_d0, lr 1e-3, 4 epochs, clip 0.2, 25,000 steps | 100 % | 90.5 % | 77 % | 51 % | |
| reach_d0, lr 1e-3, 10 epochs, clip 0.05, 25,000 steps (chosen) | 100 % | 66.5 % | 94 % | 100 % | 99.5 % |

A correction is therefore not better with all settings. Without one, the clip keeps the policy within `clip_ratio` of
the behaviour policy, four versions back: slow, but stable. With `decoupled` or `truncated`, each update may move that
far from the current policy, on advantages that are four versions old.

Rule for the default of `ppo.correction`, fixed before the runs: over clips 0.1 and 0.2, staleness 1 and 4 and seeds 0
to 4, the correction with the most successes, if it exceeds the present default (`decoupled`) by more than 1.96
standard errors of the difference over the seeds; else by the mean of the curves in the same way; else no change.

One process with one thread learns, another collects. An interrupted run resumes from its last checkpoint in
benchmarks/runs/; finished runs are stored in results/async_stale.json.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import report

RUNS = Path(__file__).parent / "runs"
RESULTS = report.RESULTS / "async_stale.json"
# the first rollouts of a run are less stale and not counted; those after an evaluation or a resume may be, too
UNCOUNTED, TOLERANCE = 5, 0.5
# seconds per update of the learner / seconds per rollout of the robots
SLOWER = 1.5
SETTINGS = [
    "task_name=reach_d0",
    "rollout.n_envs=16",
    "rollout.steps=32",
    "ppo.policy_lr=0.001",
    "ppo.mini_batch_size=128",
    "ppo.ppo_epochs=10",
    "training.total_timesteps=25000",
]
WAYS = ("sync", "none", "truncated", "decoupled", "vtrace")
CLIP, STALENESS = 0.05, 4
EVALUATE_EVERY = 5_000
EPISODES_BETWEEN, EPISODES = 50, 200


def settings_of(way: str, clip: float, staleness: int) -> list[str]:
    asynchronous = ["rollout.mode=async", f"rollout.staleness={staleness}", "rollout.least_ess=0"]
    correction = [] if way == "sync" else [*asynchronous, f"ppo.correction={way}"]
    return [*SETTINGS, f"ppo.clip_ratio={clip}", *correction]


def problem_of(way: str, clip: float, staleness: int) -> str:
    """The name under which a result is stored."""
    if (clip, staleness) == (CLIP, STALENESS) or way == "sync" and clip == CLIP:
        return way
    return f"{way} clip={clip}" + (f" staleness={staleness}" if way != "sync" else "")


def train(problem: str, seed: int, minutes: float, settings: list[str], folder: Path) -> dict:
    """Train until the last step or until `minutes` are over; return the record of the run so far."""
    import torch

    from sparring.config.schema import load_config
    from sparring.config.text import parse_overrides
    from sparring.runs.run import Run

    torch.set_num_threads(1)
    fixed = [f"seed={seed}", "threads=1", "env.threads=1", f"output={folder}", "rollout.render_episodes=0"]
    run = Run(load_config(None, parse_overrides([*settings, *fixed])), quiet=True)
    log = folder / "judged.json"
    record = json.loads(log.read_text()) if log.is_file() else {"seconds": 0.0, "curve": [], "staleness": []}
    progress, deadline = run.phase.progress, time.time() + 60 * minutes
    try:
        while run.fraction < 1 and time.time() < deadline:
            started = time.perf_counter()
            metrics = run.phase.step(run.fraction)
            record["seconds"] += time.perf_counter() - started
            record["staleness"].append(int(metrics.get("staleness", 0)))
            if run.config.rollout.mode == "async":
                # makes the learner slower than its robots, however busy the machine is
                time.sleep(max(0.0, SLOWER * metrics["collect_seconds"] - metrics["update_seconds"]))
            due = (record["curve"][-1]["steps"] if record["curve"] else 0) // EVALUATE_EVERY + 1
            if progress.env_steps >= due * EVALUATE_EVERY or run.fraction >= 1:
                point = {"steps": progress.env_steps, "seconds": round(record["seconds"], 1)}
                record["curve"].append(point | judge(run, EPISODES if run.fraction >= 1 else EPISODES_BETWEEN))
                print(f"{problem} seed {seed}: {record['curve'][-1]}", flush=True)
                run.save()
                report.write_json(log, record)
    finally:
        run.phase.env.close()
    about = {"problem": problem, "seed": seed, "commit": report.commit(), "cpu": report.cpu_model()}
    about |= {"settings": settings, "load": report.load(), "done": run.fraction >= 1}
    staleness = round(statistics.fmean(record["staleness"][UNCOUNTED:] or [0]), 3)
    return about | record | {"staleness": staleness, "updates": progress.updates}


def judge(run, episodes: int) -> dict:
    """Results of the greedy policy on held-out episodes, with 95 % intervals."""
    from sparring.envs.env import make_env
    from sparring.evaluation.play import play, wilson

    env = make_env(run.config.env, num_envs=50)
    played, _ = play(run.phase.policy, env, episodes, run.config.seed)
    env.close()
    rewards = [episode.reward for episode in played]
    won = wilson(sum(episode.success for episode in played), episodes)
    return {
        "reward": round(statistics.fmean(rewards), 2),
        "reward_margin": round(1.96 * statistics.stdev(rewards) / episodes**0.5, 2),
        "success": won.rate,
        "low": round(won.low, 4),
        "high": round(won.high, 4),
    }


def summary(runs: dict) -> str:
    """Over the seeds: the final evaluation, and the mean of all evaluations."""
    rows = [("correction", "seeds", "staleness", "final reward of each", "mean", "successes", "mean of the curve")]
    for problem in dict.fromkeys(run["problem"] for run in runs.values()):
        rows.append((problem, *_row([run for run in runs.values() if run["problem"] == problem])))
    return report.table(rows)


def _row(known: list[dict]) -> tuple:
    from sparring.evaluation.play import wilson

    ends = [run["curve"][-1] for run in known]
    won = wilson(round(sum(end["success"] for end in ends) * EPISODES), EPISODES * len(ends))
    rewards = [end["reward"] for end in ends]
    curve_mean = statistics.fmean(statistics.fmean(point["reward"] for point in run["curve"]) for run in known)
    return (
        len(known),
        f"{statistics.fmean(run['staleness'] for run in known):.2f}",
        " ".join(f"{end['reward']:.0f}+-{end['reward_margin']:.0f}" for end in ends),
        f"{statistics.fmean(rewards):.0f}",
        report.rate_in_words({"success": won.rate, "low": won.low, "high": won.high}),
        f"{curve_mean:.0f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", metavar="CORRECTION", help=f"{', '.join(WAYS)}; default: all")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--clip", type=float, nargs="+", default=[CLIP])
    parser.add_argument("--staleness", type=int, nargs="+", default=[STALENESS])
    parser.add_argument("--minutes", type=float, default=1e6, help="stop each run after this; repeat to resume")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="try other settings; not stored")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the checkpoints")
    parser.add_argument("--summary", action="store_true", help="only print the stored results")
    args = parser.parse_args()
    if not args.summary:
        for seed in args.seed:
            for clip in args.clip:
                for way in args.ways or WAYS:
                    for staleness in args.staleness if way != "sync" else [STALENESS]:
                        run_seed(way, seed, clip, staleness, args)
    if RESULTS.is_file():
        print(summary(json.loads(RESULTS.read_text())["runs"]))


def run_seed(way: str, seed: int, clip: float, staleness: int, args) -> None:
    problem = problem_of(way, clip, staleness)
    folder = args.runs / "_".join(["async_stale", problem.replace(" ", "_"), f"seed{seed}", *args.set])
    folder.mkdir(parents=True, exist_ok=True)
    outcome = train(problem, seed, args.minutes, settings_of(way, clip, staleness) + args.set, folder)
    print({key: value for key, value in outcome.items() if key not in ("curve", "settings")}, flush=True)
    if not outcome["done"]:
        print("not finished, so not stored; the same command (with more --minutes) resumes it")
    elif way != "sync" and outcome["staleness"] < staleness - TOLERANCE:
        print(f"{problem}: mean staleness {outcome['staleness']}, so not stored; robots must be faster", flush=True)
    elif not args.set and seed < 100:
        report.keep_run(RESULTS, RUNS, outcome)


if __name__ == "__main__":
    main()
