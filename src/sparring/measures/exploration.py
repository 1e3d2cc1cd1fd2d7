"""How well a policy explores: what it touches and where its hands get to, beside random actions."""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from sparring.collect.collector import Collector
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.measures.table import lined_up
from sparring.policies.policy import Policy
from sparring.policies.random import ColouredNoise, RandomPolicy

# metres a side
VOXEL = 0.05
# bins of an entry of the state, which is scaled to be about 1
BIN = 0.1
# slow and slower: the best of them is what an explorer has to beat
CORRELATIONS = (0.8, 0.9, 0.95, 0.98)


@dataclass(frozen=True)
class Exploration:
    """What robots did in so many decisions of held-out episodes."""

    decisions: int
    # share of the decisions in which a robot touched an object
    contact: float
    # places of `VOXEL` metres that a hand was in: of all robots and episodes together, and in an episode on average
    voxels: int
    voxels_per_episode: float
    # nats: of the bins that each entry of the state was in, the mean over entries
    state_entropy: float


def explore(policy: Policy, env: Env, episodes: int, seed: int, chunk: int = 1, greedy: bool = False) -> Exploration:
    """Exactly so many episodes of the eval split: robot i plays numbers i, i+N, i+2N, ...

    Policies are compared on the same number of episodes: longer, everybody gets further.
    """
    if "state" not in env.spec.observation:
        raise UserError(
            "exploration is measured in observation/state, which this env does not show; choose another env"
        )
    collector = Collector(env, policy, seed, split="eval", greedy=greedy, chunk=chunk)
    quota = np.array([len(range(robot, episodes, env.num_envs)) for robot in range(env.num_envs)])
    counts = _Counts(env)
    while quota.any():
        playing = np.flatnonzero(quota)
        counts.add(collector.decide()["next", "observation", "state"][playing].numpy(force=True), playing)
        quota[env.last.ended] = np.maximum(quota[env.last.ended] - 1, 0)
    return counts.result(episodes)


def beside_random(policy: Policy, env: Env, episodes: int, seed: int, chunk: int = 1) -> dict[str, Exploration]:
    """The policy, uniformly random actions, and random actions that change slowly, on the same episodes."""
    everybody = {"policy": policy, "uniform": RandomPolicy(env.spec, chunk).to(env.device)}
    for correlation in CORRELATIONS:
        slow = ColouredNoise(env.spec, chunk, torch.full((env.num_envs,), correlation)).to(env.device)
        everybody[f"coloured {correlation}"] = slow
    return {who: explore(actor, env, episodes, seed, chunk) for who, actor in everybody.items()}


def table(found: dict[str, Exploration]) -> str:
    rows = [("actions", "contact", "places", "places an episode", "state entropy")]
    for who, e in found.items():
        numbers = (f"{e.contact:.1%}", str(e.voxels), f"{e.voxels_per_episode:.1f}", f"{e.state_entropy:.2f}")
        rows.append((who, *numbers))
    return "\n".join(lined_up(rows))


class _Counts:
    """Of what the robots that still play have done."""

    def __init__(self, env: Env):
        self.env = env
        self.decisions = self.touched = 0
        # (robot, episode) -> its places; a place is (hand, x, y, z)
        self.places: dict[tuple[int, int], set] = {}
        self.episode = np.zeros(env.num_envs, int)
        # of each entry of the state: bin -> how often
        self.bins: list[Counter] = []

    def add(self, state: np.ndarray, robots: np.ndarray) -> None:
        """States `[n, S]` that the decisions of these robots led to, right after the env's step."""
        self.decisions += len(robots)
        self.touched += int(self.env.last.contact[robots].sum())
        for robot, hands in zip(robots.tolist(), self._places(state), strict=True):
            visited = self.places.setdefault((robot, int(self.episode[robot])), set())
            visited.update((hand, *place) for hand, place in enumerate(hands.tolist()))
        self.bins = self.bins or [Counter() for _ in range(state.shape[1])]
        for counter, column in zip(self.bins, np.floor(state / BIN).astype(int).T, strict=True):
            counter.update(column.tolist())
        self.episode[self.env.last.ended] += 1

    def result(self, episodes: int) -> Exploration:
        everywhere = set().union(*self.places.values())
        return Exploration(
            self.decisions,
            self.touched / self.decisions,
            len(everywhere),
            sum(map(len, self.places.values())) / episodes,
            float(np.mean([entropy(counter) for counter in self.bins])),
        )

    def _places(self, state: np.ndarray) -> np.ndarray:
        """`[n, hands, 3]`: the voxels that hands are in; none where the env does not tell of hands."""
        entries = list(self.env.spec.hand_entries)
        metres = state[:, entries] / self.env.spec.hand_scale
        return np.floor(metres / VOXEL).astype(int).reshape(len(state), len(entries) // 3, 3)


def entropy(counts: Counter) -> float:
    """In nats, of how often each of several things was seen."""
    total = counts.total()
    return -sum(n / total * math.log(n / total) for n in counts.values() if n)
