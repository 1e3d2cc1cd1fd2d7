"""Does RL raise a flow policy that imitated a few demonstrations to near-perfect success?

    python benchmarks/flow_gain.py stack_d0 --seed 0
    python benchmarks/flow_gain.py lift_d1 --seed 1 --minutes 20      # again to go on
    python benchmarks/flow_gain.py --summary

One process takes one seed through three stages: scripted experts record demonstrations, a flow policy imitates them,
PPO fine-tunes it on a sparse 0/1 reward. One recipe (configs/flow_imitate.yaml, configs/flow_finetune.yaml) serves all
problems; a problem only says which env, how many demonstrations and how many steps. The ODE policy (greedy) and the SDE
policy (sampled, what RL trains) play 200 held-out episodes after imitation, now and then, and at the end; that time
does not count as training. A run that is cut short goes on from its last checkpoint in benchmarks/runs/.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import report

CONFIGS = Path(__file__).parents[1] / "configs"
RUNS = Path(__file__).parent / "runs"
RESULTS = report.RESULTS / "flow_gain.json"
EPISODES = 200
# imitation must land here, RL must get there, with this lower bound of Wilson's interval
IMITATED, FINE_TUNED, LOWEST = (0.30, 0.70), 0.95, 0.90
STATE = ["env.cameras=[]", "env.object_state=state"]


@dataclass(frozen=True)
class Problem:
    """A task, what its policy sees, how many demonstrations it has, and how long RL goes on."""

    task: str
    env: list[str]
    demonstrations: int
    steps: int
    evaluate_every: int = 250_000


PROBLEMS = {
    "lift_d1": Problem("lift_d1", ["env.cameras=[head,wrist]"], 10, 3_500_000, 500_000),
    "stack_d0": Problem("stack_d0", STATE, 10, 1_500_000),
    "handover_d1": Problem("handover_d1", STATE, 10, 1_500_000),
}


def record(problem: Problem, seed: int, folder: Path) -> Path:
    """Demonstrations of a seed of their own, so that each run imitates others."""
    demos = folder / "demos"
    if not (demos / "meta" / "info.json").is_file():
        command = [sys.executable, "-m", "sparring", "demos", problem.task, "--output", str(demos), "--workers", "1"]
        settings = ["env.control_mode=delta_ee_pos", "env.threads=1", *problem.env]
        count = ["--episodes", str(problem.demonstrations), "--seed", str(seed)]
        subprocess.run([*command, *count, *settings], check=True)
    return demos


def load(name: str, fixed: list[str], threads: int, changes: list[str]):
    from sparring.config_text import parse_overrides, read_settings
    from sparring.inherit import with_inherited
    from sparring.tree import load_config

    settings = read_settings(CONFIGS / name) + parse_overrides(
        [*fixed, "threads=1", f"env.threads={threads}", *changes]
    )
    return load_config(None, with_inherited(settings))


def imitate(name: str, seed: int, folder: Path, threads: int, changes: list[str], record_: dict) -> None:
    from sparring.run import Run

    problem = PROBLEMS[name]
    demos = record(problem, seed, folder)
    fixed = [f"seed={seed}", f"imitate.demos=[{demos}]", f"output={folder / 'imitate'}"]
    run = Run(load("flow_imitate.yaml", fixed, threads, changes), quiet=True)
    started = time.perf_counter()
    run.run()
    record_["imitation_seconds"] = round(time.perf_counter() - started, 1)
    record_["imitated"] = judge(run.phase.model, run.config)
    print(f"{name} seed {seed} imitated: {record_['imitated']}", flush=True)


def fine_tune(
    name: str, seed: int, folder: Path, minutes: float, threads: int, changes: list[str], record_: dict
) -> bool:
    """Until the config's last step or out of time; whether it is done."""
    from sparring.run import Run

    problem = PROBLEMS[name]
    fixed = [f"seed={seed}", f"pretrained={folder / 'imitate'}", f"output={folder / 'finetune'}"]
    fixed.append(f"training.total_timesteps={problem.steps}")
    run = Run(load("flow_finetune.yaml", fixed, threads, changes), quiet=True)
    progress, deadline = run.phase.progress, time.time() + 60 * minutes
    while run.fraction < 1 and time.time() < deadline:
        started = time.perf_counter()
        metrics = run.phase.step(run.fraction)
        record_["seconds"] += time.perf_counter() - started
        due = (record_["curve"][-1]["steps"] if record_["curve"] else 0) // problem.evaluate_every + 1
        told = {k: round(metrics[k], 4) for k in ("success_rate", "approx_kl", "explained_variance") if k in metrics}
        print(f"{name} seed {seed}: {progress.env_steps:,} {told}", flush=True)
        if progress.env_steps >= due * problem.evaluate_every or run.fraction >= 1:
            point = {"steps": progress.env_steps, "seconds": round(record_["seconds"], 1)}
            record_["curve"].append(point | judge(run.phase.policy, run.config))
            print(f"{name} seed {seed}: {record_['curve'][-1]}", flush=True)
            run.save()
            report.write_json(folder / "judged.json", record_)
    run.save()
    report.write_json(folder / "judged.json", record_)
    record_["steps"] = progress.env_steps
    return run.fraction >= 1


def judge(policy, config) -> dict:
    """Both policies on held-out episodes, the same ones every time."""
    from sparring.envs.make import make_env
    from sparring.evaluate import play, wilson

    env = make_env(config.env, num_envs=50, device=next(policy.parameters()).device)
    rates = {}
    for who, greedy in (("ode", True), ("sde", False)):
        episodes, _ = play(policy, env, EPISODES, config.seed, config.rollout.action_steps, greedy=greedy)
        rate = wilson(sum(episode.success for episode in episodes), EPISODES)
        rates[who] = {"success": rate.rate, "low": round(rate.low, 4), "high": round(rate.high, 4)}
    env.close()
    return rates


def train(name: str, seed: int, minutes: float, threads: int, changes: list[str], folder: Path) -> dict:
    import torch

    torch.set_num_threads(1)
    log = folder / "judged.json"
    found = json.loads(log.read_text()) if log.is_file() else {"seconds": 0.0, "curve": []}
    if "imitated" not in found:
        imitate(name, seed, folder, threads, [c for c in changes if not c.startswith(("ppo.", "rollout.n"))], found)
        report.write_json(log, found)
    if minutes == 0:
        return {"problem": name, "seed": seed} | found
    done = fine_tune(name, seed, folder, minutes, threads, [c for c in changes if not c.startswith("imitate.")], found)
    hardware = report.device("cuda" if torch.cuda.is_available() else "cpu")
    about = {"problem": name, "seed": seed, "commit": report.commit(), "hardware": hardware, "threads": threads}
    return about | {"demonstrations": PROBLEMS[name].demonstrations, "done": done} | found


def summary(runs: dict[str, dict]) -> str:
    rows = [("problem", "seed", "policy", "imitated", "fine-tuned (200 episodes)", "env steps", "minutes", "target")]
    for run in sorted(runs.values(), key=lambda run: (run["problem"], run["seed"])):
        last = run["curve"][-1] if run["curve"] else None
        for who in ("ode", "sde"):
            after = report.rate_in_words(last[who]) if last else "-"
            length = (f"{last['steps']:,}", f"{last['seconds'] / 60:.1f}") if last else ("-", "-")
            met = "" if who == "sde" else "met" if _met(run) else "MISSED"
            rows.append(
                (run["problem"], run["seed"], who, report.rate_in_words(run["imitated"][who]), after, *length, met)
            )
    return report.table(rows)


def _met(run: dict) -> bool:
    low, high = IMITATED
    end = run["curve"][-1]["ode"] if run["curve"] else {"success": 0, "low": 0}
    return low <= run["imitated"]["ode"]["success"] <= high and end["success"] >= FINE_TUNED and end["low"] >= LOWEST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", nargs="?", choices=PROBLEMS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop RL after this long; the same call goes on")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="try other settings; not kept")
    parser.add_argument("--threads", type=int, default=1, help="of the simulator; results do not depend on it")
    parser.add_argument("--runs", type=Path, default=RUNS, help="where checkpoints go")
    parser.add_argument("--summary", action="store_true", help="only print what is known")
    args = parser.parse_args()
    if args.problem and not args.summary:
        folder = args.runs / "_".join(["gain", args.problem, f"seed{args.seed}", *args.set])
        folder.mkdir(parents=True, exist_ok=True)
        outcome = train(args.problem, args.seed, args.minutes, args.threads, args.set, folder)
        if not outcome.get("done"):
            print("not done yet, so not kept: the same call goes on (with more --minutes)")
        elif not args.set:
            report.keep_run(RESULTS, RUNS, outcome)
    if not RESULTS.is_file():
        print(f"nothing is known yet: {RESULTS.name} comes with the first run")
    else:
        print(summary(json.loads(RESULTS.read_text())["runs"]))


if __name__ == "__main__":
    main()
