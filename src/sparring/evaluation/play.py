"""Evaluates a policy on held-out episodes, from seeds that training never uses, with intervals and a baseline."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence

from sparring.collect.camera import Episode, EpisodeVideo
from sparring.collect.collector import Collector
from sparring.config.schema import Config
from sparring.contract import EnvSpec
from sparring.data.episodes import EpisodeRecorder
from sparring.envs.env import Env, make_env
from sparring.errors import UserError
from sparring.evaluation.files import EvaluationResult, text_table
from sparring.policies.policy import Policy
from sparring.policies.random import RandomPolicy
from sparring.processes.heartbeat import OwnStages

Device = torch.device | str
NEVER_ENDING = 20_000  # an evaluation fails after this many decisions in which no episode ended
WATCHED = 64  # robots recorded if recording is cheap; videos are chosen from them, failures first


@dataclass(frozen=True)
class _Rate:
    successes: int
    episodes: int
    rate: float
    low: float
    high: float


@dataclass(frozen=True)
class _Score:
    success: _Rate
    reward: float
    reward_std: float
    steps: float


def wilson(successes: int, episodes: int, z: float = 1.959964) -> _Rate:
    if not 0 <= successes <= episodes or episodes < 1:
        raise ValueError(f"{successes=}, {episodes=}: expected episodes >= 1 and 0 <= successes <= episodes")
    p = successes / episodes
    centre = p + z * z / (2 * episodes)
    margin = z * math.sqrt(p * (1 - p) / episodes + z * z / (4 * episodes**2))
    scale = 1 + z * z / episodes
    return _Rate(successes, episodes, p, max(0.0, (centre - margin) / scale), min(1.0, (centre + margin) / scale))


def held_out_env(config: Config, device: Device, robots: int | None = None) -> Env:
    """Make an env with `robots` robots (default: as many as the run had), rounded up to a multiple of the tasks."""
    if OwnStages.now is None:
        # in a run the watchdog exists already
        OwnStages(1, config.rollout.watchdog_s).watch()
    tasks = len(getattr(config.env, "task", ())) or 1
    robots = -(-(robots or config.rollout.n_envs) // tasks) * tasks
    return make_env(config.env, robots, config.rollout.max_episode_steps, device)


def held_out_decisions(collector: Collector, episodes: int) -> Iterator[tuple[TensorDict, np.ndarray, list[Episode]]]:
    """Decide until `episodes` episodes have ended. Robot i runs episodes i, i+N, ..., so the set of episodes does not
    depend on N. Yields each decision `[N]`, the robots whose current episodes count, and the episodes that it ended."""
    robots = collector.env.num_envs
    quota = np.array([len(range(robot, episodes, robots)) for robot in range(robots)])
    since_last_end = 0
    while quota.any():
        counted = np.flatnonzero(quota)
        td, ended = collector.decide(), collector.drain_episodes()
        since_last_end = 0 if ended else since_last_end + 1
        if since_last_end > NEVER_ENDING:
            raise UserError(f"no episode ended in {NEVER_ENDING} decisions; set rollout.max_episode_steps")
        for episode in ended:
            quota[episode.env] = max(quota[episode.env] - 1, 0)
        yield td, counted, ended


def play(
    policy: Policy, env: Env, episodes: int, seed: int, chunk: int = 1, greedy: bool = True, videos: int = 0
) -> tuple[list[Episode], list[EpisodeVideo]]:
    """Returns the episodes in the order of their ends, and `videos` videos of the first episode of a robot each;
    failures come first."""
    training = policy.training
    policy.eval()
    collector = Collector(env, policy, seed, split="eval", greedy=greedy, chunk=chunk)
    if videos:
        collector.camera.record_video(min(max(videos, WATCHED if collector.camera.is_cheap else 0), episodes))
    decisions = held_out_decisions(collector, episodes)
    played = [episode for _, counted, ended in decisions for episode in ended if episode.env in counted]
    policy.train(training)
    return played, collector.camera.drain_failures_first(videos)


def held_out_episodes(env: Env, policy: Policy, episodes: int, seed: int, chunk: int) -> TensorDict:
    """Returns transitions of held-out episodes `[E, T]`, padded with zeros where `mask` is False."""
    collector = Collector(env, policy, seed, split="eval", chunk=chunk)
    recorded: list[TensorDict] = []
    store: Any = SimpleNamespace(append=lambda rows, **_: recorded.append(rows))
    recorder = EpisodeRecorder(store, env.num_envs)
    chosen: list[TensorDict] = []
    for td, counted, ended in held_out_decisions(collector, episodes):
        recorder.add(td)
        # both lists have the ended episodes in the order of the robots
        chosen += [rows for episode, rows in zip(ended, recorded, strict=True) if episode.env in counted]
        recorded.clear()
    steps = torch.tensor([len(rows) for rows in chosen])
    shape = [len(chosen), int(steps.max())]
    padded = TensorDict({}, shape)
    for key in chosen[0].keys(True, True):
        padded.set(key, pad_sequence([rows[key] for rows in chosen], batch_first=True))
    padded["mask"] = torch.arange(shape[1]) < steps[:, None]
    return padded


@dataclass
class Evaluation(EvaluationResult):
    scores: dict[str, dict[str, _Score]]  # who -> task -> score
    videos: list[EpisodeVideo]
    spec: EnvSpec
    no_video_reason: str | None = None  # why requested videos are missing

    @classmethod
    def run(cls, config: Config, policy: Policy, device: Device, **shown: Any) -> "Evaluation":
        """`shown`: `greedy`, `videos` and `both` of `evaluate`."""
        env = held_out_env(config, device)
        chunk, shown["baseline"] = config.rollout.action_steps, config.evaluation.baseline
        try:
            return evaluate(policy, env, config.evaluation.episodes, config.seed, chunk, **shown)
        finally:
            env.close()

    def table(self, width: int | None = None) -> str:
        rows: list[tuple[str, ...]] = [("policy", "task", "success", "95 % interval", "reward", "steps")]
        for who, tasks in self.scores.items():
            for task, score in tasks.items():
                s = score.success
                success = (f"{s.rate:.1%}", f"{s.low:.1%} - {s.high:.1%}") if self.spec.reports_success else ("-", "-")
                reward = f"{score.reward:.2f} +- {score.reward_std:.2f}"
                rows.append((who, task, *success, reward, f"{score.steps:.1f}"))
        return text_table(rows, width=width, spare=(1, 0))

    def numbers(self) -> dict[str, float | None]:
        tasks = self.scores["policy"]
        shown = {"": self.overall("policy")}
        shown |= {f"{task}/": score for task, score in tasks.items() if "all" in tasks and task != "all"}
        others = {"sampled_": "policy, sampled", "random_": "random"}
        shown |= {prefix: self.overall(who) for prefix, who in others.items() if who in self.scores}
        numbers: dict[str, float | None] = {"episodes": self.episodes}
        for prefix, score in shown.items():
            for name, value in (("rate", score.success.rate), ("low", score.success.low), ("high", score.success.high)):
                numbers[f"{prefix}success_{name}"] = value if self.spec.reports_success else None
            numbers |= {f"{prefix}reward": score.reward, f"{prefix}steps": score.steps}
        return numbers

    def overall(self, who: str) -> _Score:
        tasks = self.scores[who]
        return tasks["all"] if "all" in tasks else next(iter(tasks.values()))

    def content(self) -> dict:
        scores = {who: {task: asdict(score) for task, score in tasks.items()} for who, tasks in self.scores.items()}
        if not self.spec.reports_success:
            for score in (score for tasks in scores.values() for score in tasks.values()):
                score["success"] |= dict.fromkeys(("successes", "rate", "low", "high"))
        return {"scores": scores}


def evaluate(
    policy: Policy,
    env: Env,
    episodes: int,
    seed: int = 0,
    chunk: int = 1,
    greedy: bool = True,
    baseline: bool = True,
    videos: int = 0,
    both: bool = False,
) -> Evaluation:
    """Run held-out episodes with `policy` and with random actions. `both`: with greedy and with sampled actions."""
    played, recorded = play(policy, env, episodes, seed, chunk, greedy, videos)
    scores = {"policy": _score_by_task(played, env.spec)}
    if greedy and (both or policy.reports_sampled):
        played, _ = play(policy, env, episodes, seed, chunk, greedy=False)
        scores["policy, sampled"] = _score_by_task(played, env.spec)
    if baseline:
        played, _ = play(RandomPolicy(env.spec, chunk).to(env.device), env, episodes, seed, chunk, greedy=False)
        scores["random"] = _score_by_task(played, env.spec)
    no_video_reason = why_no_picture(env) if videos and not recorded else None
    return Evaluation(episodes, seed, scores, recorded, env.spec, no_video_reason)


def why_no_picture(env: Env) -> str:
    no_picture = getattr(env.backend, "no_picture", None)
    return (no_picture and no_picture(0)) or "the env renders no images: its render() returns None"


def _score_by_task(episodes: list[Episode], spec: EnvSpec) -> dict[str, _Score]:
    def score(played: list[Episode]) -> _Score:
        rewards = np.array([episode.reward for episode in played])
        success = wilson(sum(episode.success for episode in played), len(played))
        steps = float(np.mean([episode.steps for episode in played]))
        return _Score(success, float(rewards.mean()), float(rewards.std()), steps)

    # phrasings of one task share its name
    tasks = dict.fromkeys(spec.task_names[task] for task in sorted({episode.task for episode in episodes}))
    scores = {task or "task": score([e for e in episodes if spec.task_names[e.task] == task]) for task in tasks}
    return scores | ({"all": score(episodes)} if len(tasks) > 1 else {})
