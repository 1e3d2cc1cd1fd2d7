"""Measures exploration: contacts with objects and visited voxels, compared with random actions."""

import math
from collections import Counter
from dataclasses import asdict, dataclass

import numpy as np
import torch
from tensordict import TensorDict

from sparring.collect.collector import Collector
from sparring.config.schema import Config
from sparring.config.section import Section
from sparring.envs.env import Env, make_env
from sparring.errors import UserError
from sparring.evaluation.files import EvaluationResult, text_table
from sparring.evaluation.play import Device, held_out_decisions
from sparring.policies.policy import Policy
from sparring.policies.random import ColouredNoise, RandomPolicy

VOXEL = 0.05  # side in metres
BIN = 0.1  # bin width of an entry of the state, which is scaled to about 1
CORRELATIONS = (0.8, 0.9, 0.95, 0.98)  # of coloured noise; the baseline is the best of them


@dataclass(frozen=True)
class _Exploration:
    decisions: int
    contact: float  # share of the decisions in which a robot touched an object
    # voxels that a hand visited: over all robots and episodes, and the mean per episode
    voxels: int
    voxels_per_episode: float
    # voxels of objects other than their start voxels; None: EnvSpec.object_entries is empty
    object_voxels: int | None
    state_entropy: float  # nats: entropy of an entry of the state in bins, averaged over the entries


@dataclass
class ExplorationEvaluation(EvaluationResult):
    found: dict[str, _Exploration]

    @classmethod
    def run(cls, config: Config, policy: Policy, device: Device) -> "ExplorationEvaluation":
        rollout, episodes = config.rollout, config.evaluation.episodes
        env = make_env(_showing_objects(config.env), rollout.n_envs, rollout.max_episode_steps, device)
        training = policy.training
        try:
            found = compare_with_random(policy.eval(), env, episodes, config.seed, rollout.action_steps)
        finally:
            env.close()
            policy.train(training)
        return cls(episodes, config.seed, found)

    def table(self, width: int | None = None) -> str:
        rows = [("actions", "contact", "voxels", "voxels per episode", "object voxels", "state entropy")]
        for who, e in self.found.items():
            moved = "n/a" if e.object_voxels is None else str(e.object_voxels)
            numbers = f"{e.contact:.1%}", str(e.voxels), f"{e.voxels_per_episode:.1f}", moved, f"{e.state_entropy:.2f}"
            rows.append((who, *numbers))
        return text_table(rows, width=width)

    def numbers(self) -> dict[str, float | None]:
        random = max(found.contact for who, found in self.found.items() if who != "policy")
        explored = asdict(self.found["policy"])
        del explored["decisions"]
        return {"episodes": self.episodes, "random_contact": random} | explored

    def content(self) -> dict:
        return {"exploration": {who: asdict(found) for who, found in self.found.items()}}


def _showing_objects(env_config: Section) -> Section:
    """Returns the same env with object positions in `privileged`, which only this measure reads."""
    hidden = getattr(env_config, "object_state", None) == "hidden"
    return env_config.model_copy(update={"object_state": "privileged"}) if hidden else env_config


def compare_with_random(policy: Policy, env: Env, episodes: int, seed: int, chunk: int = 1) -> dict[str, _Exploration]:
    """Measure the policy, uniformly random actions and coloured noise on the same episodes."""
    policies = {"policy": policy, "uniform": RandomPolicy(env.spec, chunk).to(env.device)}
    for correlation in CORRELATIONS:
        coloured = ColouredNoise(env.spec, chunk, torch.full((env.num_envs,), correlation)).to(env.device)
        policies[f"coloured {correlation}"] = coloured
    return {who: _explore(actor, env, episodes, seed, chunk) for who, actor in policies.items()}


def _explore(policy: Policy, env: Env, episodes: int, seed: int, chunk: int = 1) -> _Exploration:
    """Measure exactly `episodes` episodes: the number of voxels grows with the number of episodes."""
    if "state" not in env.spec.observation:
        raise UserError("exploration is measured from observation/state, which this env does not have; use another env")
    counts = _Counts(env)
    for td, robots, _ in held_out_decisions(Collector(env, policy, seed, split="eval", chunk=chunk), episodes):
        counts.add(td[robots], robots)  # type: ignore[call-overload]
    return counts.result(episodes)


class _Counts:
    def __init__(self, env: Env):
        self.env = env
        self.decisions = self.contacts = 0
        self.reached: dict[tuple[int, int], set] = {}  # (robot, episode) -> voxels as (hand, x, y, z)
        self.episode = np.zeros(env.num_envs, int)
        # [N, objects, 3] start voxels, and other voxels as (object, x, y, z)
        self.began = np.zeros((env.num_envs, len(env.spec.object_entries) // 3, 3), int)
        self.moved_to: set[tuple[int, ...]] = set()
        self.bins: list[Counter] = []  # for each entry of the state: bin -> count

    def add(self, td: TensorDict, robots: np.ndarray) -> None:
        state = td["next", "observation", "state"].numpy(force=True)
        self.decisions += len(robots)
        self.contacts += int(np.asarray(self.env.last.contact)[robots].sum())
        if entries := self.env.spec.object_entries:
            both = (td["observation"], td["next", "observation"])
            # [n, objects, 3]
            before, after = (self._voxels(seen["privileged"].numpy(force=True), entries) for seen in both)
            is_first = td["is_first"].numpy(force=True)
            self.began[robots[is_first]] = before[is_first]
            moved = (after != self.began[robots]).any(-1)
            self.moved_to.update((int(k), *after[row, k].tolist()) for row, k in np.argwhere(moved))
        voxels = self._voxels(state, self.env.spec.hand_entries)  # [n, hands, 3]
        for robot, hands in zip(robots.tolist(), voxels, strict=True):
            visited = self.reached.setdefault((robot, int(self.episode[robot])), set())
            visited.update((hand, *voxel) for hand, voxel in enumerate(hands.tolist()))
        self.bins = self.bins or [Counter() for _ in range(state.shape[1])]
        for counter, column in zip(self.bins, np.floor(state / BIN).astype(int).T, strict=True):
            counter.update(column.tolist())
        self.episode[self.env.last.ended] += 1

    def result(self, episodes: int) -> _Exploration:
        reached, entropy = self.reached.values(), float(np.mean([_entropy(counter) for counter in self.bins]))
        voxels, each = len(set().union(*reached)), sum(map(len, reached)) / episodes
        moved = len(self.moved_to) if self.env.spec.object_entries else None
        return _Exploration(self.decisions, self.contacts / self.decisions, voxels, each, moved, entropy)

    def _voxels(self, vectors: np.ndarray, entries: tuple[int, ...]) -> np.ndarray:
        """Positions among the entries of `[n, S]` -> voxels `[n, positions, 3]`; `entries` may be empty."""
        metres = vectors[:, list(entries)] / self.env.spec.hand_scale
        return np.floor(metres / VOXEL).astype(int).reshape(len(vectors), -1, 3)


def _entropy(counts: Counter) -> float:
    total = counts.total()
    return -sum(n / total * math.log(n / total) for n in counts.values() if n)
