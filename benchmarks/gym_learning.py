"""Does PPO learn in as few steps as stable-baselines3, with published hyperparameters?

CartPole-v1 and Pendulum-v1 with the hyperparameters that rl-baselines3-zoo publishes, the same for both libraries
(Sparring's are in configs/cartpole.yaml and configs/pendulum.yaml). For Pendulum the zoo uses state-dependent
exploration (gSDE): both libraries run as published ("+ sde") and, to compare the plain algorithm, without it.

Both libraries are evaluated on the same held-out episodes, greedily, about every 5,000 env steps:
`final return` is the mean of 100 episodes after training; `last five` is the mean of the last five evaluations (this
one, and four of 20 episodes), since the return of Pendulum varies between checkpoints; `steps to threshold` is the
first evaluation (20 episodes) that passes, in a run whose final return also passes.

    python benchmarks/gym_learning.py --seeds 5 --jobs 2

Finished runs are stored in benchmarks/results/gym_learning.json and skipped the next time; delete it to start again.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import report

CONFIGS = Path(__file__).parents[1] / "configs"
RESULTS = report.RESULTS / "gym_learning.json"
TOTAL_STEPS = 100_000
EVALUATE_EVERY = 5_000
EVALUATION_EPISODES = 20
FINAL_EPISODES = 100
LAST_EVALUATIONS = 5


@dataclass(frozen=True)
class Problem:
    """A gymnasium env, its threshold, and the hyperparameters of rl-baselines3-zoo for PPO of SB3."""

    env_id: str
    config: str
    threshold: float
    n_envs: int
    zoo: dict
    # settings of state-dependent exploration, if the zoo uses it
    zoo_sde: dict

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(variant of Sparring, variant of SB3) for each comparison."""
        plain, sde = ("sparring", "sb3"), ("sparring + sde", "sb3 + sde")
        return [plain, sde] if self.zoo_sde else [plain]

    @property
    def libraries(self) -> list[str]:
        return [library for pair in self.pairs for library in pair]


PROBLEMS = {
    "CartPole-v1": Problem(
        env_id="CartPole-v1",
        config="cartpole.yaml",
        threshold=490.0,
        n_envs=8,
        # "lin_x" of the zoo: falls linearly to 0 over the run
        zoo={
            "n_steps": 32,
            "batch_size": 256,
            "gae_lambda": 0.8,
            "gamma": 0.98,
            "n_epochs": 20,
            "ent_coef": 0.0,
            "learning_rate": "lin_0.001",
            "clip_range": "lin_0.2",
        },
        zoo_sde={},
    ),
    "Pendulum-v1": Problem(
        env_id="Pendulum-v1",
        config="pendulum.yaml",
        threshold=-250.0,
        n_envs=4,
        zoo={
            "n_steps": 1024,
            "batch_size": 64,
            "gae_lambda": 0.95,
            "gamma": 0.9,
            "n_epochs": 10,
            "ent_coef": 0.0,
            "learning_rate": 1e-3,
            "clip_range": 0.2,
        },
        zoo_sde={"use_sde": True, "sde_sample_freq": 4},
    ),
}


class Judge:
    """Evaluates every `every` env steps and records the learning curve. `play(episodes)` returns their returns."""

    def __init__(self, play: Callable[[int], list[float]], every: int):
        self.play, self.every = play, every
        self.curve: list[tuple[int, float]] = []
        self.due = every

    def evaluate_if_due(self, env_steps: int) -> None:
        if env_steps >= self.due:
            self.curve.append((env_steps, statistics.fmean(self.play(EVALUATION_EPISODES))))
            self.due = env_steps + self.every

    def verdict(self, threshold: float, env_steps: int) -> dict:
        final = statistics.fmean(self.play(FINAL_EPISODES))
        self.curve.append((env_steps, final))
        first = next((steps for steps, score in self.curve if score >= threshold), None)
        return {
            "steps_to_threshold": first if final >= threshold else None,
            "final_return": final,
            "curve": self.curve,
        }


def train_sparring(problem: Problem, seed: int, total_steps: int, sde: bool) -> dict:
    from sparring.config.schema import load_config
    from sparring.config.text import Setting
    from sparring.envs.env import make_env
    from sparring.evaluation.play import play
    from sparring.runs.run import Run

    settings = {"seed": seed, "device": "cpu", "training.total_timesteps": total_steps}
    if problem.zoo_sde and not sde:
        settings["policy.distribution"] = "gaussian"
    overrides = [Setting(key, value, "benchmark") for key, value in settings.items()]
    config = load_config(CONFIGS / problem.config, overrides)
    # the training loop without files: seeds and schedules are those of `sparring train`
    run = Run(config, folder=False, quiet=True)

    def held_out_returns(episodes: int) -> list[float]:
        env = make_env(config.env, num_envs=episodes)
        played, _ = play(run.phase.policy, env, episodes, seed)
        env.close()
        return [episode.reward for episode in sorted(played, key=lambda episode: episode.env)]

    judge = Judge(held_out_returns, EVALUATE_EVERY)
    while run.fraction < 1:
        run.phase.step(run.fraction)
        if run.fraction < 1:
            judge.evaluate_if_due(run.phase.progress.env_steps)
    return judge.verdict(problem.threshold, run.phase.progress.env_steps)


def train_sb3(problem: Problem, seed: int, total_steps: int, sde: bool) -> dict:
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    class EvaluateBetweenUpdates(BaseCallback):
        def _on_rollout_start(self) -> None:
            judge.evaluate_if_due(self.num_timesteps)

        def _on_step(self) -> bool:
            return True

    env = make_vec_env(problem.env_id, n_envs=problem.n_envs, seed=seed)
    published = problem.zoo | problem.zoo_sde if sde else problem.zoo
    settings = {key: _schedule(value) for key, value in published.items()}
    model = PPO("MlpPolicy", env, seed=seed, device="cpu", **settings)
    judge = Judge(lambda episodes: _sb3_returns(model, problem.env_id, episodes, seed), EVALUATE_EVERY)
    model.learn(total_steps, callback=EvaluateBetweenUpdates())
    return judge.verdict(problem.threshold, model.num_timesteps)


def _schedule(value):
    """rl-baselines3-zoo's notation: "lin_0.001" is 0.001 times the part of the run that remains."""
    if not isinstance(value, str):
        return value
    start = float(value.removeprefix("lin_"))
    return lambda remaining: start * remaining


def _sb3_returns(model, env_id: str, episodes: int, seed: int) -> list[float]:
    """Returns of the same episodes that Sparring's evaluation plays."""
    import gymnasium
    import numpy as np

    from sparring.envs.backend import EpisodeSeeds

    seeds = EpisodeSeeds(seed, "eval", total_envs=episodes)
    envs = [gymnasium.make(env_id) for _ in range(episodes)]
    observations = np.stack([env.reset(seed=seeds(i, 0))[0] for i, env in enumerate(envs)])
    returns, running = [0.0] * episodes, list(range(episodes))
    while running:
        actions, _ = model.predict(observations[running], deterministic=True)
        ended = []
        for i, action in zip(running, actions, strict=True):
            observations[i], reward, terminated, truncated, _ = envs[i].step(action)
            returns[i] += float(reward)
            ended += [i] if terminated or truncated else []
        running = [i for i in running if i not in ended]
    return returns


def train(library: str, env_id: str, seed: int, total_steps: int, deadline: float) -> dict | None:
    """Train one run, in a new process; None if the deadline has passed."""
    if time.time() > deadline:
        return None
    import torch

    torch.set_num_threads(1)
    problem, started = PROBLEMS[env_id], time.time()
    train_it = train_sparring if library.startswith("sparring") else train_sb3
    outcome = train_it(problem, seed, total_steps, sde=library.endswith("+ sde"))
    about = {"library": library, "env": env_id, "seed": seed, "total_steps": total_steps, "commit": report.commit()}
    return about | outcome | {"seconds": round(time.time() - started, 1)}


def run_missing(runs: dict[str, dict], wanted: list[tuple[str, str, int]], args) -> None:
    """Train the runs that `runs` lacks; store each finished run immediately."""
    missing = [run for run in wanted if _key(*run) not in runs]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} runs are already stored", flush=True)
    deadline = time.time() + 60 * args.minutes
    # tiny networks do not profit from threads; must be set before the workers import torch
    os.environ["OMP_NUM_THREADS"] = "1"
    # one run per process: no run inherits the random state or the caches of another
    pool = ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    with pool:
        futures = [pool.submit(train, *run, args.steps, deadline) for run in missing]
        for future in as_completed(futures):
            outcome = future.result()
            if outcome is None:
                continue
            runs[_key(outcome["library"], outcome["env"], outcome["seed"])] = outcome
            if args.output is not None:
                report.write_json(args.output, {"about": report.metadata(), "runs": runs})
            print(
                f"{outcome['env']}, {outcome['library']}, seed {outcome['seed']}: threshold after "
                f"{_count(_steps(outcome))} steps, final {outcome['final_return']:.1f}, last five "
                f"{mean_of_last(outcome):.1f}, {outcome['seconds']:.0f} s",
                flush=True,
            )


def summary(runs: dict[str, dict]) -> str:
    spread = "median (min..max)"
    judged = [f"{name}: {spread}" for name in ("steps to threshold", "final", "last five")]
    rows = [("env", "library", "seeds", "learned", *judged)]
    verdicts = []
    for env_id, problem in PROBLEMS.items():
        by_library = {
            library: [run for run in runs.values() if (run["env"], run["library"]) == (env_id, library)]
            for library in problem.libraries
        }
        for library, done in by_library.items():
            if done:
                learned = sum(run["steps_to_threshold"] is not None for run in done)
                finals = [run["final_return"] for run in done]
                rows.append(
                    (
                        env_id,
                        library,
                        len(done),
                        f"{learned}/{len(done)}",
                        _spread([_steps(run) for run in done], _count),
                        _spread(finals, "{:.1f}".format),
                        _spread([mean_of_last(run) for run in done], "{:.1f}".format),
                    )
                )
        verdicts += [
            _verdict(env_id, ours, by_library[ours], peer, by_library[peer])
            for ours, peer in problem.pairs
            if by_library[ours] and by_library[peer]
        ]
    return "\n".join([report.table(rows), "", *verdicts])


def _verdict(env_id: str, us: str, ours: list[dict], peer: str, theirs: list[dict]) -> str:
    """Within the peer's spread: our median is no worse than the peer's worst seed, in steps and in final return."""
    steps, final = statistics.median(map(_steps, ours)), statistics.median(run["final_return"] for run in ours)
    slowest, worst = max(map(_steps, theirs)), min(run["final_return"] for run in theirs)
    within = steps <= slowest and final >= worst
    last, worst_last = statistics.median(map(mean_of_last, ours)), min(map(mean_of_last, theirs))
    return (
        f"{env_id}: {us} is {'within' if within else 'OUTSIDE'} the spread of {peer} "
        f"(steps {_count(steps)}, theirs up to {_count(slowest)}; final {final:.1f}, theirs from {worst:.1f}; "
        f"last five evaluations {last:.1f}, theirs from {worst_last:.1f})"
    )


def mean_of_last(run: dict) -> float:
    """Mean of the last evaluations, equally weighted: a single checkpoint may be an outlier."""
    return statistics.fmean(score for _, score in run["curve"][-LAST_EVALUATIONS:])


def _steps(run: dict) -> float:
    return float("inf") if run["steps_to_threshold"] is None else run["steps_to_threshold"]


def _count(steps: float) -> str:
    return "never" if steps == float("inf") else f"{steps:,.0f}"


def _spread(values: list[float], describe: Callable[[float], str]) -> str:
    low, middle, high = map(describe, (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low}..{high})"


def _key(library: str, env_id: str, seed: int) -> str:
    return f"{env_id}/{library}/{seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=list(PROBLEMS), action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs, one thread each")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no run after this")
    parser.add_argument("--quick", action="store_true", help="check that it runs: one short seed, results not stored")
    args = parser.parse_args()
    args.steps, args.output = (10_000, None) if args.quick else (TOTAL_STEPS, RESULTS)
    args.seeds = 1 if args.quick else args.seeds
    runs = {}
    if args.output is not None and args.output.is_file():
        runs = json.loads(args.output.read_text())["runs"]
    # seed by seed, so that an interrupted benchmark has the same seeds for all libraries
    wanted = [
        (library, env_id, seed)
        for seed in range(args.seed, args.seed + args.seeds)
        for env_id in args.env or PROBLEMS
        for library in PROBLEMS[env_id].libraries
    ]
    run_missing(runs, wanted, args)
    print(f"\n{summary(runs)}")


if __name__ == "__main__":
    main()
