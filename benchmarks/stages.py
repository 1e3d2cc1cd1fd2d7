"""Three stages that several benchmarks share: experts record demonstrations, a policy imitates them, RL fine-tunes it.

A benchmark defines its problems and how a policy is evaluated. An interrupted run resumes from its last checkpoint.
Evaluation does not count as training time.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import report

CONFIGS = Path(__file__).parents[1] / "configs"
RUNS = Path(__file__).parent / "runs"
# printed after each update
PRINTED = ("success_rate", "approx_kl", "explained_variance")


@dataclass(frozen=True)
class Problem:
    """Tasks of the built-in robot, or one gymnasium env; env settings, demonstrations per task, and env steps of RL."""

    tasks: tuple[str, ...]
    env: list[str]
    demonstrations: int
    steps: int
    evaluate_every: int = 250_000
    # settings of RL that differ from the recipe
    finetuning: tuple[str, ...] = ()
    noise: float = 0.0
    # RL ends after this training time, also before its last step
    hours: float = float("inf")

    @property
    def is_built_in(self) -> bool:
        return ":" not in self.tasks[0]


@dataclass(frozen=True)
class Stages:
    """One problem with one seed; `judge(policy, config)` evaluates a policy and returns the results to store."""

    name: str
    problem: Problem
    # config files of the two learning stages, in configs/
    imitation: str
    finetuning: str
    judge: Callable
    seed: int
    folder: Path
    minutes: float
    threads: int
    device: str
    changes: list[str]

    def run(self) -> dict:
        import torch

        torch.set_num_threads(1)
        log = self.folder / "judged.json"
        record = json.loads(log.read_text()) if log.is_file() else {"seconds": 0.0, "curve": []}
        if "imitated" not in record:
            self._imitate(record)
            report.write_json(log, record)
        about = {"problem": self.name, "seed": self.seed, "commit": report.commit()}
        about |= {"hardware": report.device(self.device), "threads": self.threads}
        done = self.minutes > 0 and self._fine_tune(record)
        return about | {"demonstrations": self.problem.demonstrations, "done": done} | record

    def _record(self) -> list[Path]:
        """Record with the seed of the run, so that runs have different demonstrations."""
        return [self._demonstrate(task) for task in self.problem.tasks]

    def _demonstrate(self, task: str) -> Path:
        demos = self.folder / ("demos" if len(self.problem.tasks) == 1 else f"demos_{task}")
        if not (demos / "meta" / "info.json").is_file():
            command = [sys.executable, "-m", "sparring", "demos", task, "--output", str(demos), "--workers", "1"]
            settings = ["env.control_mode=delta_ee_pos", "env.threads=1"] if self.problem.is_built_in else []
            settings += [*self.problem.env, "--noise", str(self.problem.noise)]
            count = ["--episodes", str(self.problem.demonstrations), "--seed", str(self.seed)]
            subprocess.run([*command, *count, *settings], check=True)
        return demos

    def load(self, name: str, fixed: list[str], not_for: tuple[str, ...]):
        from sparring.config.schema import load_config
        from sparring.config.text import parse_overrides, read_settings

        machine = [f"seed={self.seed}", f"device={self.device}", "threads=1"]
        machine += [f"env.threads={self.threads}"] if self.problem.is_built_in else []
        changes = [change for change in self.changes if not change.startswith(not_for)]
        settings = read_settings(CONFIGS / name) + parse_overrides([*fixed, *machine, *changes])
        return load_config(None, settings)

    def _imitate(self, record: dict) -> None:
        from sparring.runs.run import Run

        demos = ",".join(str(folder) for folder in self._record())
        fixed = [f"imitate.demos=[{demos}]", f"output={self.folder / 'imitate'}"]
        run = Run(self.load(self.imitation, fixed, ("ppo.", "rollout.n", "env.reward")), quiet=True)
        started = time.perf_counter()
        run.run()
        record["imitation_seconds"] = round(time.perf_counter() - started, 1)
        record["imitated"] = self.judge(run.phase.model, run.config)
        self._print(f"imitated: {record['imitated']}")

    def _fine_tune(self, record: dict) -> bool:
        """Train until the last step or until the hours of the problem or the minutes of this call are over; return
        whether it finished. Hours are training time, of all calls together."""
        from sparring.runs.run import Run

        every = self.problem.evaluate_every
        fixed = [f"pretrained={self.folder / 'imitate'}", f"output={self.folder / 'finetune'}"]
        fixed.append(f"training.total_timesteps={self.problem.steps}")
        run = Run(self.load(self.finetuning, [*fixed, *self.problem.finetuning], ("imitate.",)), quiet=True)
        progress, deadline = run.phase.progress, time.time() + 60 * self.minutes
        limit = 3600 * self.problem.hours
        while run.fraction < 1 and record["seconds"] < limit and time.time() < deadline:
            started = time.perf_counter()
            metrics = run.phase.step(run.fraction)
            record["seconds"] += time.perf_counter() - started
            self._print(f"{progress.env_steps:,} { {k: round(metrics[k], 4) for k in PRINTED if k in metrics} }")
            due = (record["curve"][-1]["steps"] if record["curve"] else 0) // every + 1
            if progress.env_steps >= due * every or run.fraction >= 1 or record["seconds"] >= limit:
                point = {"steps": progress.env_steps, "seconds": round(record["seconds"], 1)}
                record["curve"].append(point | self.judge(run.phase.policy, run.config))
                self._print(record["curve"][-1])
                run.save()
                report.write_json(self.folder / "judged.json", record)
        run.save()
        report.write_json(self.folder / "judged.json", record)
        record["steps"] = progress.env_steps
        return run.fraction >= 1 or record["seconds"] >= limit

    def _print(self, what) -> None:
        print(f"{self.name} seed {self.seed}: {what}", flush=True)


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop RL after this; repeat the command to resume")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="try other settings; not stored")
    parser.add_argument("--threads", type=int, default=1, help="simulator threads; results do not depend on it")
    parser.add_argument("--device", default="cpu", help="device of the networks: cpu or cuda")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the checkpoints")
    parser.add_argument("--summary", action="store_true", help="only print the stored results")
    return parser


def run(args, kind: str, name: str, problem: Problem, configs: tuple[str, str], judge: Callable, results: Path) -> None:
    """Run one problem as the flags say; store the outcome if it finished without --set."""
    folder = args.runs / "_".join([kind, name, f"seed{args.seed}", *args.set])
    folder.mkdir(parents=True, exist_ok=True)
    stages = Stages(
        name, problem, *configs, judge, args.seed, folder, args.minutes, args.threads, args.device, args.set
    )
    outcome = stages.run()
    if not outcome["done"]:
        print("not finished, so not stored: the same call goes on (with more --minutes)")
    elif not args.set:
        report.keep_run(results, args.runs, outcome)


def command(
    description: str,
    kind: str,
    problems: dict[str, Problem],
    configs: tuple[str, str],
    judge: Callable,
    results: Path,
    summary: Callable,
) -> None:
    """The command of a benchmark: run the problem that is named, then print the stored results."""
    parser = make_parser(description)
    parser.add_argument("problem", nargs="?", choices=problems)
    args = parser.parse_args()
    if args.problem and not args.summary:
        run(args, kind, args.problem, problems[args.problem], configs, judge, results)
    print_summary(results, summary)


def print_summary(results: Path, summary: Callable) -> None:
    if not results.is_file():
        print(f"no results yet: the first finished run writes {results.name}")
    else:
        print(summary(json.loads(results.read_text())["runs"]))


def play(policy, config, episodes: int, greedy: bool, robots: int = 48) -> list:
    """Play held-out episodes, the same at each call. 48 robots: divisible by 1, 2 and 3 tasks."""
    from sparring.envs.env import make_env
    from sparring.evaluation.play import play as play_episodes

    limit, device = config.rollout.max_episode_steps, next(policy.parameters()).device
    env = make_env(config.env, robots, limit, device)
    played, _ = play_episodes(policy, env, episodes, config.seed, config.rollout.action_steps, greedy=greedy)
    env.close()
    return played


def rate(episodes: list) -> dict:
    from sparring.evaluation.play import wilson

    found = wilson(sum(episode.success for episode in episodes), len(episodes))
    return {"success": found.rate, "low": round(found.low, 4), "high": round(found.high, 4)}
