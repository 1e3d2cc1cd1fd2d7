"""Episodes that training never sees, in memory."""

import torch
from tensordict import TensorDict

from sparring.collect.collector import Collector
from sparring.data.episode_recorder import EpisodeRecorder
from sparring.envs.env import Env
from sparring.policies.policy import Policy


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
