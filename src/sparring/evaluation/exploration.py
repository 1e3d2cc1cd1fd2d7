"""How well a policy explores: what it touches and where its hands get to, beside random actions."""

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict

from sparring.collect.collector import Collector
from sparring.envs.env import Env, make_env
from sparring.errors import UserError
from sparring.evaluation.files import lined_up
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
    # places that objects were brought to: voxels, of each object, in which it did not begin the episode; None where the
    # env does not tell (EnvSpec.object_entries)
    object_voxels: int | None
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
        counts.add(collector.decide()[playing], playing)
        quota[env.last.ended] = np.maximum(quota[env.last.ended] - 1, 0)
    return counts.result(episodes)


def showing_objects(env_config):
    """The same env, which tells this measure where things are, and policies no more than before."""
    hidden = getattr(env_config, "object_state", None) == "hidden"
    return env_config.model_copy(update={"object_state": "privileged"}) if hidden else env_config


def beside_random(policy: Policy, env: Env, episodes: int, seed: int, chunk: int = 1) -> dict[str, Exploration]:
    """The policy, uniformly random actions, and random actions that change slowly, on the same episodes."""
    everybody = {"policy": policy, "uniform": RandomPolicy(env.spec, chunk).to(env.device)}
    for correlation in CORRELATIONS:
        slow = ColouredNoise(env.spec, chunk, torch.full((env.num_envs,), correlation)).to(env.device)
        everybody[f"coloured {correlation}"] = slow
    return {who: explore(actor, env, episodes, seed, chunk) for who, actor in everybody.items()}


@dataclass
class ExplorationEvaluation:
    """A policy's exploration beside that of random actions, on so many episodes of the eval split."""

    episodes: int
    seed: int
    found: dict[str, Exploration]

    def table(self) -> str:
        rows = [("actions", "contact", "places", "places an episode", "places of objects", "state entropy")]
        for who, e in self.found.items():
            moved = "n/a" if e.object_voxels is None else str(e.object_voxels)
            numbers = f"{e.contact:.1%}", str(e.voxels), f"{e.voxels_per_episode:.1f}", moved, f"{e.state_entropy:.2f}"
            rows.append((who, *numbers))
        return "\n".join(lined_up(rows))

    def numbers(self) -> dict[str, float | None]:
        """For evaluations.jsonl."""
        others = [found.contact for who, found in self.found.items() if who != "policy"]
        explored = asdict(self.found["policy"])
        del explored["decisions"]
        return {"episodes": self.episodes, "random_contact": max(others)} | explored

    def write(self, path: Path, about: dict | None = None) -> Path:
        content = {"episodes": self.episodes, "seed": self.seed, "split": "eval"} | (about or {})
        content["exploration"] = {who: asdict(exploration) for who, exploration in self.found.items()}
        path.write_text(json.dumps(content, indent=2) + "\n")
        return path


def evaluate_exploration(config, policy: Policy, device) -> ExplorationEvaluation:
    """As a run's config asks for it, in an env of its own; actions are sampled, as an explorer does."""
    rollout, episodes = config.rollout, config.evaluation.episodes
    env = make_env(showing_objects(config.env), rollout.n_envs, rollout.max_episode_steps, device)
    training = policy.training
    try:
        found = beside_random(policy.eval(), env, episodes, config.seed, rollout.action_steps)
    finally:
        env.close()
        policy.train(training)
    return ExplorationEvaluation(episodes, config.seed, found)


class _Counts:
    """Of what the robots that still play have done."""

    def __init__(self, env: Env):
        self.env = env
        self.decisions = self.touched = 0
        # (robot, episode) -> its places; a place is (hand, x, y, z)
        self.places: dict[tuple[int, int], set] = {}
        self.episode = np.zeros(env.num_envs, int)
        # [N, objects, 3] where they began, and (object, x, y, z) of where else they were
        self.began = np.zeros((env.num_envs, len(env.spec.object_entries) // 3, 3), int)
        self.brought: set[tuple[int, ...]] = set()
        # of each entry of the state: bin -> how often
        self.bins: list[Counter] = []

    def add(self, td: TensorDict, robots: np.ndarray) -> None:
        """Decisions `[n]` of these robots, right after the env's step."""
        state = td["next", "observation", "state"].numpy(force=True)
        self.decisions += len(robots)
        self.touched += int(self.env.last.contact[robots].sum())
        if self.env.spec.object_entries:
            self._follow_objects(td, robots)
        # [n, hands, 3]
        places = self._voxels(state, self.env.spec.hand_entries)
        for robot, hands in zip(robots.tolist(), places, strict=True):
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
            len(self.brought) if self.env.spec.object_entries else None,
            float(np.mean([entropy(counter) for counter in self.bins])),
        )

    def _follow_objects(self, td: TensorDict, robots: np.ndarray) -> None:
        # [n, objects, 3]
        before, after = (
            self._voxels(seen["privileged"].numpy(force=True), self.env.spec.object_entries)
            for seen in (td["observation"], td["next", "observation"])
        )
        is_first = td["is_first"].numpy(force=True)
        self.began[robots[is_first]] = before[is_first]
        moved = (after != self.began[robots]).any(-1)
        self.brought.update((int(k), *after[row, k].tolist()) for row, k in np.argwhere(moved))

    def _voxels(self, vectors: np.ndarray, entries: tuple[int, ...]) -> np.ndarray:
        """Positions among the entries of `[n, S]` -> `[n, positions, 3]`; none where the env does not tell."""
        metres = vectors[:, list(entries)] / self.env.spec.hand_scale
        return np.floor(metres / VOXEL).astype(int).reshape(len(vectors), -1, 3)


def entropy(counts: Counter) -> float:
    """In nats, of how often each of several things was seen."""
    total = counts.total()
    return -sum(n / total * math.log(n / total) for n in counts.values() if n)
