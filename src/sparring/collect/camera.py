"""Tracks episodes that end, and records videos of some of them."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from tensordict import TensorDict

from sparring.envs.backend import Picture, Step, drawn
from sparring.envs.env import Env


@dataclass(frozen=True)
class Episode:
    env: int
    task: int
    reward: float
    steps: int
    success: bool
    contact: float = 0.0  # share of the decisions in which the robot touched an object


class EpisodeTracker:
    """Sums rewards and steps per robot, and returns every episode that ends."""

    def __init__(self, num_envs: int):
        self.rewards = np.zeros(num_envs)
        # env steps; decisions, and those with contact
        self.steps, self.decisions, self.contacts = np.zeros((3, num_envs), np.int64)
        self._sums = {name: getattr(self, name) for name in ("rewards", "steps", "decisions", "contacts")}

    def add(self, step: Step) -> list[Episode]:
        self.rewards += step.reward.sum(1)
        self.steps += step.executed
        self.decisions += 1
        assert step.contact is not None
        self.contacts += step.contact
        if not len(step.ended):
            return []
        # the task is from the final observation, because the root has that of the next episode
        tasks = step.final.get("task", np.zeros(len(step.ended), np.int64))
        contact = self.contacts / self.decisions
        episodes = [
            Episode(e, int(task), float(self.rewards[e]), int(self.steps[e]), bool(step.success[e]), float(contact[e]))
            for e, task in zip(step.ended.tolist(), tasks, strict=True)
        ]
        for sums in self._sums.values():
            sums[step.ended] = 0
        return episodes

    def state_dict(self) -> dict:
        return {name: torch.from_numpy(sums.copy()) for name, sums in self._sums.items()}

    def load_state_dict(self, state: dict) -> None:
        for name, sums in self._sums.items():
            sums[:] = state[name].numpy()


@dataclass(frozen=True)
class EpisodeVideo:
    """One recorded episode of T steps. Values of a decision are repeated for each step of its chunk."""

    frames: list[Picture]  # T + 1: before the first step and after each step
    episode: Episode
    rewards: np.ndarray  # [T], those of the env
    values: np.ndarray  # [T], V of the observations before the decisions; NaN if it was not computed
    actions: np.ndarray  # [T, A], as the policy chose them
    states: np.ndarray  # [T, S], as the policy observed them (S = 0 without a state)

    def rendered(self) -> "EpisodeVideo":
        """Returns a copy with rendered frames, which can be sent to another process."""
        return replace(self, frames=[drawn(frame) for frame in self.frames])


@dataclass
class _Decision:
    """A decision of the R recorded robots: `[R, C]`, `[R]`, `[R, C, A]`, `[R, S]`, `[R]` (set later if unknown)."""

    rows: dict[int, int]  # robot -> row
    reward: np.ndarray
    executed: np.ndarray
    action: np.ndarray
    state: np.ndarray
    value: np.ndarray


@dataclass
class _Recording:
    frames: list[Picture]
    decisions: list[_Decision] = field(default_factory=list)

    def video(self, episode: Episode) -> EpisodeVideo:
        rewards, values, actions, states = [], [], [], []
        for decision in self.decisions:
            row = decision.rows[episode.env]
            steps = decision.executed[row]
            rewards.append(decision.reward[row, :steps])
            values.append(np.repeat(decision.value[row], steps))
            actions.append(decision.action[row, :steps])
            states.append(np.repeat(decision.state[row][None], steps, axis=0))
        return EpisodeVideo(self.frames, episode, *map(np.concatenate, (rewards, values, actions, states)))


@dataclass
class Camera:
    """Records the next complete episode of each of the first robots. Other robots are not rendered."""

    env: Env
    # robots whose next episode will be recorded; robot -> its running recording; complete recordings
    waiting: set[int] = field(default_factory=set)
    running: dict[int, _Recording] = field(default_factory=dict)
    complete: list[tuple[_Recording, Episode]] = field(default_factory=list)
    # number of decisions of this rollout so far, and recorded decisions whose values are not known yet
    decisions: int = 0
    without_value: list[tuple[int, _Decision]] = field(default_factory=list)

    @property
    def is_cheap(self) -> bool:
        """Whether frames are rendered only if they are used."""
        return self._sketch(0) is not None

    def record_video(self, robots: int) -> None:
        self.waiting |= set(range(min(robots, self.env.num_envs))) - self.running.keys()

    def reset(self) -> None:
        """Call after a reset of all robots; recordings of interrupted episodes are dropped."""
        if robots := {*self.waiting, *self.running}:
            self._begin(robots)

    def add(self, td: TensorDict, ended: list[Episode]) -> None:
        """Add a decision `td` [N] and the episodes that it ended; call after every decision."""
        self.decisions += 1
        if not (self.waiting or self.running):
            return
        if self.running:
            decision = self._decision(td)
            for robot, recording in self.running.items():
                recording.frames += self.env.last.frames.get(robot, [])
                recording.decisions.append(decision)
        finished = [episode for episode in ended if episode.env in self.running]
        for episode in finished:
            recording = self.running.pop(episode.env)
            self.complete += [(recording, episode)] if recording.frames else []
        beginning = self.waiting.intersection(self.env.last.ended.tolist())
        if finished or beginning:
            self._begin(beginning)

    def set_values(self, values: torch.Tensor) -> None:
        """Set the values of the recorded decisions from `[T, N]` of a rollout; call after every rollout."""
        for step, decision in self.without_value:
            decision.value = _array(values[step])[list(decision.rows)]
        self.without_value.clear()
        self.decisions = 0

    def drain(self) -> list[EpisodeVideo]:
        """Returns the videos recorded since the last call."""
        complete, self.complete = self.complete, []
        return [recording.video(episode) for recording, episode in complete]

    def drain_failures_first(self, most: int) -> list[EpisodeVideo]:
        """Returns at most so many videos, failures first, then in the order of the robots."""
        self.complete = sorted(self.complete, key=lambda one: (one[1].success, one[1].env))[:most]
        return self.drain()

    def _decision(self, td: TensorDict) -> _Decision:
        robots, last = list(self.running), self.env.last
        # some envs have no state, and some policies compute no value when they act
        state, value = td["observation"].get("state", None), td.get("value", None)
        rows = {robot: row for row, robot in enumerate(robots)}
        states = np.zeros((len(robots), 0), np.float32) if state is None else _array(state.flatten(1))[robots]
        values = np.full(len(robots), np.nan) if value is None else _array(value)[robots]
        executed = (last.reward[robots], last.executed[robots], _array(td["action"])[robots])
        decision = _Decision(rows, *executed, states, values)
        if value is None:
            self.without_value.append((self.decisions - 1, decision))
        return decision

    def _begin(self, robots: set[int]) -> None:
        self.waiting -= robots
        for robot in sorted(robots):
            frame = self._sketch(robot)
            if frame is None:
                frame = self.env.render(robot)
            self.running[robot] = _Recording([] if frame is None else [frame])
        self.env.backend.record(sorted(self.running))

    def _sketch(self, robot: int) -> Picture | None:
        sketch = getattr(self.env.backend, "sketch", None)
        return sketch(robot) if sketch else None


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy(force=True)
