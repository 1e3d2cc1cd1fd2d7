"""Held-out episodes of a policy."""

import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict

from sparring.collect.camera import Episode, Film
from sparring.collect.collector import Collector
from sparring.config.schema import Config
from sparring.contract import EnvSpec
from sparring.data.recorder import EpisodeRecorder
from sparring.envs.env import Env, make_env
from sparring.errors import UserError
from sparring.policies.policy import Policy
from sparring.policies.random import RandomPolicy

# ---- Sums that become means at the end.


class Tally:
    """`add` numbers under a name, some at a time; `mean` of all of them."""

    def __init__(self):
        self.sums: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)

    def add(self, name: str, values: torch.Tensor, where: torch.Tensor | None = None) -> None:
        """`where`: which of the values count; None: all."""
        values = values if where is None else values[where]
        self.sums[name] += float(values.double().sum())
        self.counts[name] += values.numel()

    def mean(self, name: str) -> float | None:
        """None where there was nothing."""
        return self.sums[name] / self.counts[name] if self.counts[name] else None

    def ratio(self, name: str, other: str) -> float | None:
        """Of two means; None where either is missing, or the other is 0."""
        below = self.mean(other)
        return self.mean(name) / below if below and self.counts[name] else None


# ---- Episodes that training never sees, in memory.


class _Kept:
    """What an EpisodeRecorder takes for a store."""

    def __init__(self):
        self.episodes: list[TensorDict] = []

    def append(self, episode: TensorDict, **info) -> None:
        self.episodes.append(episode)


def held_out_episodes(env: Env, policy: Policy, episodes: int, seed: int, chunk: int) -> TensorDict:
    """Exactly `episodes` of them, of the eval split: `[E, T]`, filled up and `mask`ed where they are shorter.

    Robot i plays numbers i, i+N, i+2N, ..., as in an evaluation.
    """
    collector = Collector(env, policy, seed, split="eval", chunk=chunk)
    kept = _Kept()
    recorder = EpisodeRecorder(kept, env.num_envs)
    quota = [len(range(robot, episodes, env.num_envs)) for robot in range(env.num_envs)]
    chosen: list[TensorDict] = []
    while any(quota):
        recorder.add(collector.decide())
        # both tell of ended episodes in the order of the robots
        for ended, episode in zip(collector.drain_episodes(), kept.episodes, strict=True):
            if quota[ended.env]:
                quota[ended.env] -= 1
                chosen.append(episode)
        kept.episodes.clear()
    return _padded(chosen)


def _padded(episodes: list[TensorDict]) -> TensorDict:
    steps = torch.tensor([len(episode) for episode in episodes])
    shape = [len(episodes), int(steps.max())]
    padded = TensorDict({}, shape)
    for key, first in episodes[0].items(True, True):
        column = torch.zeros(*shape, *first.shape[1:], dtype=first.dtype)
        for row, episode in zip(column, episodes, strict=True):
            row[: len(episode)] = episode[key]
        padded.set(key, column)
    padded["mask"] = torch.arange(shape[1]) < steps[:, None]
    return padded


# ---- Evaluation: exactly so many episodes, from seeds that training never sees, with intervals and a baseline.


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
