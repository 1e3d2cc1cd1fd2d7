"""Plays an env for `sparring check`: checks the contract of every step, and records what the steps show.
Letters: N robots, C steps of a chunk, A action dims, S state dims, M moments."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import cast

import numpy as np
import torch
from tensordict import TensorDict

from sparring.contract import EnvSpec, check_observation, check_step
from sparring.envs.env import Env
from sparring.errors import UserError

TEXTS = ("task", "instruction")  # they may stay the same from episode to episode
PICTURES = ("image", "depth", "segmentation", "points")
_MOMENTS, _FEWEST = 16, 6  # recorded moments: maximum number, and the number that a short first episode is filled up to
_MOST_NUMBERS = 2e7  # of recorded states: 80 MB


def _leaves(td: TensorDict) -> dict[str, torch.Tensor]:
    # "image/head" -> its tensor
    return {
        "/".join((key,) if isinstance(key, str) else key): cast(torch.Tensor, value)
        for key, value in td.items(True, True)
    }


class Player:
    """Plays one env, and measures its time without that of the checks."""

    def __init__(self, env: Env, chunk: int):
        self.env, self.chunk = env, chunk
        self.reset_s, self.step_s, self.env_steps = 0.0, 0.0, 0
        self.td = TensorDict({})  # what the env returned last

    def reset(self, seed: int) -> TensorDict:
        began = time.perf_counter()
        self.td = self.env.reset(seed)
        self.reset_s = time.perf_counter() - began
        check_observation(self.td, self.env.spec, "env.reset")
        return self.td

    def step(self, action: np.ndarray) -> TensorDict:
        """Execute `[N, C, A]`; raise UserError if the env breaks the contract."""
        given, before = action.copy(), self.td.clone()
        began = time.perf_counter()
        after = self.env.step(TensorDict({"action": torch.from_numpy(action)}, [len(action)]))
        self.step_s += time.perf_counter() - began
        check_step(after, self.env.spec, self.chunk, "env.step")
        step = self.env.last
        assert step is not None
        self.env_steps += int(step.executed.sum())
        if not np.array_equal(given, action):
            raise UserError("step() changed the action array that it was given; copy it first")
        for name, value in _leaves(self.td).items():
            if not torch.equal(value, _leaves(before)[name]):
                raise UserError(f"step() changed {name} that was returned before; return copies of arrays")
        expected = np.flatnonzero(step.terminated | step.truncated)
        if not np.array_equal(step.ended, expected):
            fix = "give the robots that are terminated or truncated, ascending"
            raise UserError(f"Step.ended is {step.ended.tolist()}, but episodes of {expected.tolist()} ended; {fix}")
        if (step.executed < self.chunk)[~(step.terminated | step.truncated)].any():
            raise UserError("Step.executed is less than the chunk although no episode ended; execute all of it")
        late = np.arange(self.chunk) >= step.executed[:, None]
        if (step.reward[late] != 0).any():
            raise UserError("Step.reward is not 0 after the end of an episode; leave the rest of the chunk at 0")
        self.td = after
        return after

    def random_actions(self) -> Iterator[np.ndarray]:
        """Uniform actions `[N, C, A]`, always the same. Every second robot holds each for 8 decisions, which takes it
        further."""
        spec, rng = self.env.spec, np.random.default_rng(0)
        held = np.zeros(self._shape, np.float32)
        for number in count():
            drawn = rng.uniform(-1, 1, held.shape)
            drawn = np.floor((drawn + 1) / 2 * spec.discrete_actions) if spec.discrete_actions else drawn
            changes = slice(None) if number % 8 == 0 else slice(None, None, 2)
            held[changes] = drawn[changes]
            yield held.copy()

    def bound_actions(self) -> Iterator[np.ndarray]:
        """The bounds of continuous actions, alike and mixed, or each choice of discrete ones."""
        choices, rng = self.env.spec.discrete_actions, np.random.default_rng(1)
        for number in count():
            mixed = np.sign(rng.uniform(-1, 1, self._shape))
            alike = number % choices if choices else (-1.0, 1.0)[number % 2]
            yield (mixed if number % 4 >= 2 and not choices else np.full(self._shape, alike)).astype(np.float32)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.env.num_envs, self.chunk, self.env.spec.action_dim

    @staticmethod
    def digests(td: TensorDict) -> dict[str, bytes]:
        return {name: blake2b(value.numpy().tobytes(), digest_size=16).digest() for name, value in _leaves(td).items()}


@dataclass(frozen=True)
class _EndedEpisode:
    steps: int
    terminated: bool
    success: bool
    reward: float


class Facts:
    """What the transitions of a run show. Sums instead of lists, so that a long run takes little memory."""

    def __init__(self, td: TensorDict, spec: EnvSpec):
        self.spec, robots = spec, len(td)
        first = _leaves(td["observation"])
        self.low = {name: value.amin(0) for name, value in first.items()}
        self.high = {name: value.amax(0) for name, value in first.items()}
        self.reward = [np.inf, -np.inf]  # smallest and largest of a step
        self.ended: list[_EndedEpisode] = []
        self.ended_apart = False  # whether an episode ended while another one continued
        self.decisions = 0
        # for ends of episodes: number of rows whose last observation is that of the next episode, the one before the
        # step, or zero; for other steps: number of rows that changed, of `inner`
        self.of_next, self.of_before, self.zero, self.changed = ({name: 0 for name in first} for _ in range(4))
        self.inner = 0
        self.varied_starts = {name: False for name in first}
        self._start = {name: value.clone() for name, value in first.items()}
        self.succeeds_at_once = False  # whether all robots had a success in their first decision
        self.states: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # before, after [N, S], ended [N]
        self._sums = np.zeros(robots), np.zeros(robots, np.int64)
        self.moments: list[tuple[int, dict[str, torch.Tensor]]] = []  # (decision, pictures [N, ...])
        self._stride, self._first_ended = 1, False
        self._see_moment(first)

    def add(self, before: TensorDict, player: Player) -> None:
        after, step = player.td, player.env.last
        assert step is not None
        was, then, root = (
            _leaves(td) for td in (before["observation"], after["next"]["observation"], after["observation"])
        )
        for name, value in then.items():
            self.low[name] = torch.minimum(self.low[name], value.amin(0))
            self.high[name] = torch.maximum(self.high[name], value.amax(0))
        executed = np.arange(player.chunk) < step.executed[:, None]
        rewards = step.reward[executed]
        self.reward = [min(self.reward[0], float(rewards.min())), max(self.reward[1], float(rewards.max()))]
        ended = torch.from_numpy(step.terminated | step.truncated)
        for name, value in then.items():
            differs = (value != was[name]).reshape(len(value), -1).any(1)
            self.changed[name] += int(differs[~ended].sum())
            self.of_before[name] += int((~differs[ended]).sum())
            self.of_next[name] += int((value == root[name]).reshape(len(value), -1).all(1)[ended].sum())
            self.zero[name] += int((value == 0).reshape(len(value), -1).all(1)[ended].sum())
        self.inner += int((~ended).sum())
        if "state" in then and (len(self.states) + 1) * was["state"].numel() < _MOST_NUMBERS:
            self.states.append((was["state"].flatten(1), then["state"].flatten(1), ended))
        returns, steps = self._sums
        returns += step.reward.sum(1)
        steps += step.executed
        for robot in step.ended:
            terminated, success = bool(step.terminated[robot]), bool(step.success[robot])
            self.ended.append(_EndedEpisode(int(steps[robot]), terminated, success, float(returns[robot])))
            returns[robot] = steps[robot] = 0
        self.ended_apart |= 0 < len(step.ended) < len(ended)
        if len(step.ended):
            # compared for each robot: what differs between robots need not differ between episodes
            for name, value in root.items():
                self.varied_starts[name] |= bool((value != self._start[name])[ended].any())
        self.succeeds_at_once |= self.decisions == 0 and bool(step.success.all())
        self.decisions += 1
        self._see_moment(root)
        self._first_ended |= bool(ended[0])

    def state_differs(self, decision: int, td: TensorDict) -> float:
        """The largest difference of the state after this decision, relative to the range of the entry; inf: unknown."""
        if decision > len(self.states):
            return np.inf
        spread = (self.high["state"] - self.low["state"]).flatten().clamp_min(1e-6)
        state = td["next", "observation", "state"].flatten(1)
        return float(((state - self.states[decision - 1][1]).abs() / spread).max())

    def pictures_differ(self, decision: int, td: TensorDict) -> float:
        """The largest mean difference of an entry with pictures after this decision, relative to its range; 0 if they
        were not kept."""
        found = _leaves(td["observation"])
        return max(
            (
                float((found[name].double() - value.double()).abs().mean() / self._range(name))
                for number, pictures in self.moments
                for name, value in pictures.items()
                if number == decision
            ),
            default=0.0,
        )

    def _range(self, name: str) -> float:
        if name.startswith("image/"):
            return 255.0
        return max(float(self.high[name].max()) - float(self.low[name].min()), 1e-6)

    def _see_moment(self, observation: dict[str, torch.Tensor]) -> None:
        """Keep at most _MOMENTS moments of the first robot's first episode, at equal distances."""
        if self.decisions % self._stride or (self._first_ended and len(self.moments) >= _FEWEST):
            return
        shown = {name: value.clone() for name, value in observation.items() if name.partition("/")[0] in PICTURES}
        self.moments.append((self.decisions, shown))
        if len(self.moments) > _MOMENTS:
            self.moments, self._stride = self.moments[::2], 2 * self._stride
