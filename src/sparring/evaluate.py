"""Evaluation: exactly so many episodes, from seeds that training never sees, with intervals and a baseline."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sparring.collect.camera import Film
from sparring.collect.collector import Collector
from sparring.collect.episodes import Episode
from sparring.envs.backend import EnvSpec
from sparring.envs.env import Env
from sparring.envs.make import make_env
from sparring.errors import UserError
from sparring.policies.policy import Policy
from sparring.policies.random import RandomPolicy
from sparring.tree import Config

# decisions without any episode ending, after which an evaluation gives up
NEVER_ENDING = 20_000
# robots that are filmed, where that is cheap, to choose from: failures are shown first
WATCHED = 64


@dataclass(frozen=True)
class Rate:
    """A share of successes with its Wilson 95 % interval."""

    successes: int
    episodes: int
    rate: float
    low: float
    high: float


@dataclass(frozen=True)
class Score:
    """How one policy did on one task."""

    success: Rate
    reward: float
    reward_std: float
    steps: float


def wilson(successes: int, episodes: int, z: float = 1.959964) -> Rate:
    """Wilson's score interval (formulas.md, section 5)."""
    if not 0 <= successes <= episodes or episodes < 1:
        raise ValueError(f"{successes} successes of {episodes} episodes is not a rate")
    p = successes / episodes
    centre = p + z * z / (2 * episodes)
    margin = z * math.sqrt(p * (1 - p) / episodes + z * z / (4 * episodes**2))
    scale = 1 + z * z / episodes
    return Rate(successes, episodes, p, max(0.0, (centre - margin) / scale), min(1.0, (centre + margin) / scale))


def play(
    policy: Policy, env: Env, episodes: int, seed: int, chunk: int = 1, greedy: bool = True, films: int = 0
) -> tuple[list[Episode], list[Film]]:
    """Exactly `episodes` episodes: robot i plays numbers i, i+N, i+2N, ... and those beyond the last do not count.

    So no robot's short episodes crowd out another's long ones, and the same episodes are played whatever N is.
    `films`: so many of the robots' first episodes come as films, failures first.
    """
    training = policy.training
    policy.eval()
    collector = Collector(env, policy, seed, split="eval", greedy=greedy, chunk=chunk)
    quota = [len(range(env_index, episodes, env.num_envs)) for env_index in range(env.num_envs)]
    if films:
        collector.camera.film(min(max(films, WATCHED if collector.camera.is_cheap else 0), episodes))
    counted: list[Episode] = []
    collector.start()
    fruitless = 0
    while any(quota):
        collector.decide()
        fruitless = 0 if collector.episodes else fruitless + 1
        if fruitless > NEVER_ENDING:
            raise UserError(f"no episode ended in {NEVER_ENDING} decisions; give it a limit: rollout.max_episode_steps")
        for episode in collector.drain_episodes():
            if quota[episode.env]:
                quota[episode.env] -= 1
                counted.append(episode)
    policy.train(training)
    return counted, collector.camera.drain_failures_first(films)


def score_by_task(episodes: list[Episode], task_names: tuple[str, ...]) -> dict[str, Score]:
    """One Score per task that was played; 'all' too when there are several."""
    # several phrasings of one task have one name
    played = dict.fromkeys(task_names[task] for task in sorted({e.task for e in episodes}))
    scores = {name or "task": _score([e for e in episodes if task_names[e.task] == name]) for name in played}
    return scores | ({"all": _score(episodes)} if len(played) > 1 else {})


def _overall(scores: dict[str, Score]) -> Score:
    """Of all tasks together."""
    return scores["all"] if "all" in scores else next(iter(scores.values()))


def _score(episodes: list[Episode]) -> Score:
    rewards = np.array([e.reward for e in episodes])
    return Score(
        success=wilson(sum(e.success for e in episodes), len(episodes)),
        reward=float(rewards.mean()),
        reward_std=float(rewards.std()),
        steps=float(np.mean([e.steps for e in episodes])),
    )


@dataclass
class Evaluation:
    """A policy beside its baseline, on the same episodes."""

    episodes: int
    seed: int
    # who -> task -> score
    scores: dict[str, dict[str, Score]]
    films: list[Film]
    spec: EnvSpec
    # why there are none although some were asked for
    no_films: str | None = None

    def table(self) -> str:
        rows = [("policy", "task", "success", "95 % interval", "reward", "steps")]
        for who, tasks in self.scores.items():
            for task, score in tasks.items():
                s = score.success
                success = (f"{s.rate:.1%}", f"{s.low:.1%} - {s.high:.1%}") if self.spec.reports_success else ("-", "-")
                rows.append(
                    (who, task, *success, f"{score.reward:.2f} +- {score.reward_std:.2f}", f"{score.steps:.1f}")
                )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])

    def numbers(self) -> dict[str, float | None]:
        """For evaluations.jsonl: over all tasks, of each where there are several, and of who else has played."""
        tasks = self.scores["policy"]
        numbers = {"episodes": self.episodes} | self._told("", _overall(tasks))
        for task in tasks if "all" in tasks else ():
            numbers |= {} if task == "all" else self._told(f"{task}/", tasks[task])
        for who, prefix in (("policy, sampled", "sampled_"), ("random", "random_")):
            numbers |= self._told(prefix, _overall(self.scores[who])) if who in self.scores else {}
        return numbers

    def _told(self, prefix: str, score: Score) -> dict[str, float | None]:
        success = score.success
        known = (success.rate, success.low, success.high) if self.spec.reports_success else (None, None, None)
        told = dict(zip(("success_rate", "success_low", "success_high"), known, strict=True))
        return {
            f"{prefix}{name}": value for name, value in (told | {"reward": score.reward, "steps": score.steps}).items()
        }

    def write(self, path: Path, about: dict | None = None) -> Path:
        content = {"episodes": self.episodes, "seed": self.seed, "split": "eval"} | (about or {})
        content["scores"] = {w: {t: asdict(s) for t, s in tasks.items()} for w, tasks in self.scores.items()}
        path.write_text(json.dumps(content, indent=2) + "\n")
        return path


def evaluate(
    policy: Policy,
    env: Env,
    episodes: int,
    seed: int = 0,
    chunk: int = 1,
    greedy: bool = True,
    baseline: bool = True,
    films: int = 0,
    both: bool = False,
) -> Evaluation:
    """`policy` and, beside it, uniformly random actions on the same held-out episodes.

    `both`: with greedy actions and with sampled ones; so is any policy that says they do otherwise.
    """
    played, reels = play(policy, env, episodes, seed, chunk, greedy, films)
    scores = {"policy": score_by_task(played, env.spec.task_names)}
    if greedy and (both or policy.reports_sampled):
        sampled, _ = play(policy, env, episodes, seed, chunk, greedy=False)
        scores["policy, sampled"] = score_by_task(sampled, env.spec.task_names)
    if baseline:
        random = RandomPolicy(env.spec, chunk).to(env.device)
        scores["random"] = score_by_task(play(random, env, episodes, seed, chunk, greedy=False)[0], env.spec.task_names)
    return Evaluation(episodes, seed, scores, reels, env.spec, _why_none(env) if films and not reels else None)


def _why_none(env: Env) -> str:
    """Why nothing was filmed, as far as the env tells."""
    told = getattr(env.backend, "no_picture", None)
    return (told and told(0)) or "the env draws nothing: its render() gives None"


def evaluate_config(
    config: Config, policy: Policy, device, greedy: bool = True, films: int = 0, both: bool = False
) -> Evaluation:
    """An evaluation as a run's config asks for it, in an env of its own."""
    episodes, chunk, baseline = config.evaluation.episodes, config.rollout.action_steps, config.evaluation.baseline
    env = held_out_env(config, device)
    try:
        return evaluate(policy, env, episodes, config.seed, chunk, greedy, baseline, films, both)
    finally:
        env.close()


def held_out_env(config: Config, device, robots: int | None = None) -> Env:
    """As many robots as the run had, or so many; of each task the same number."""
    tasks = len(getattr(config.env, "task", ())) or 1
    robots = -(-(robots or config.rollout.n_envs) // tasks) * tasks
    return make_env(config.env, robots, config.rollout.max_episode_steps, device)
