"""Episodes that ended, and films of some of them."""

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
    contact: float = 0.0  # share of its decisions in which the robot touched an object


class EpisodeTracker:
    """Adds up rewards and steps per env, and returns every episode that ends."""

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
        # of the episode that ended: the root's task is already that of the next one
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
    """One recorded episode of T steps. Per-decision values are repeated for each step of the chunk."""

    frames: list[Picture]  # T + 1: before the first step and after each
    episode: Episode
    rewards: np.ndarray  # [T], the env's own
    values: np.ndarray  # [T] of what the policy saw when it decided; NaN where nobody worked it out
    actions: np.ndarray  # [T, A] as asked for
    states: np.ndarray  # [T, S] as seen by the policy (S = 0 where it sees no state)

    def rendered(self) -> "EpisodeVideo":
        """With its pictures drawn, fit to be sent to another process."""
        return replace(self, frames=[drawn(frame) for frame in self.frames])


@dataclass
class _Decision:
    """Of the R robots that are being filmed: `[R, C]`, `[R]`, `[R, C, A]`, `[R, S]`, and `[R]` once it is known."""

    place: dict[int, int]
    reward: np.ndarray
    executed: np.ndarray
    action: np.ndarray
    state: np.ndarray
    value: np.ndarray


@dataclass
class _Reel:
    frames: list[Picture]
    decisions: list[_Decision] = field(default_factory=list)

    def record_video(self, episode: Episode) -> EpisodeVideo:
        rewards, values, actions, states = [], [], [], []
        for decision in self.decisions:
            row = decision.place[episode.env]
            steps = decision.executed[row]
            rewards.append(decision.reward[row, :steps])
            values.append(np.repeat(decision.value[row], steps))
            actions.append(decision.action[row, :steps])
            states.append(np.repeat(decision.state[row][None], steps, axis=0))
        return EpisodeVideo(self.frames, episode, *map(np.concatenate, (rewards, values, actions, states)))


@dataclass
class Camera:
    """Films the next whole episode of the first few robots. Nothing is drawn of any other."""

    env: Env
    # robots whose next episode is to be filmed; what there is of those that are being filmed, and of whole ones
    waiting: set[int] = field(default_factory=set)
    reels: dict[int, _Reel] = field(default_factory=dict)
    whole: list[tuple[_Reel, Episode]] = field(default_factory=list)
    # decisions of this rollout so far, and those of them that were filmed, whose values are not known yet
    clock: int = 0
    unvalued: list[tuple[int, _Decision]] = field(default_factory=list)

    @property
    def is_cheap(self) -> bool:
        """Whether pictures that nobody looks at are never drawn."""
        return self._sketch(0) is not None

    def record_video(self, robots: int) -> None:
        self.waiting |= set(range(min(robots, self.env.num_envs))) - self.reels.keys()

    def all_began(self) -> None:
        """Every robot was reset; an episode that was broken off is not shown."""
        if robots := {*self.waiting, *self.reels}:
            self._begin(robots)

    def look(self, td: TensorDict, ended: list[Episode]) -> None:
        """After every decision `td` [N], with the episodes that ended in it."""
        self.clock += 1
        if not (self.waiting or self.reels):
            return
        if self.reels:
            decision = self._seen(td)
            for robot, reel in self.reels.items():
                reel.frames += self.env.last.frames.get(robot, [])
                reel.decisions.append(decision)
        over = [episode for episode in ended if episode.env in self.reels]
        for episode in over:
            reel = self.reels.pop(episode.env)
            self.whole += [(reel, episode)] if reel.frames else []
        beginning = self.waiting.intersection(self.env.last.ended.tolist())
        if over or beginning:
            self._begin(beginning)

    def appraise(self, values: torch.Tensor) -> None:
        """After a rollout: the values `[T, N]` of its decisions."""
        for row, decision in self.unvalued:
            decision.value = _array(values[row])[list(decision.place)]
        self.unvalued.clear()
        self.clock = 0

    def drain(self) -> list[EpisodeVideo]:
        """What was filmed since the last call."""
        whole, self.whole = self.whole, []
        return [reel.record_video(episode) for reel, episode in whole]

    def drain_failures_first(self, most: int) -> list[EpisodeVideo]:
        """At most so many: what went wrong is what people want to see; else in the order of the robots."""
        self.whole = sorted(self.whole, key=lambda one: (one[1].success, one[1].env))[:most]
        return self.drain()

    def _seen(self, td: TensorDict) -> _Decision:
        robots, last = list(self.reels), self.env.last
        # not every env shows a state, and not every policy appraises what it sees when it acts
        state, value = td["observation"].get("state", None), td.get("value", None)
        places = {robot: place for place, robot in enumerate(robots)}
        states = np.zeros((len(robots), 0), np.float32) if state is None else _array(state.flatten(1))[robots]
        values = np.full(len(robots), np.nan) if value is None else _array(value)[robots]
        did = (last.reward[robots], last.executed[robots], _array(td["action"])[robots])
        decision = _Decision(places, *did, states, values)
        if value is None:
            self.unvalued.append((self.clock - 1, decision))
        return decision

    def _begin(self, robots: set[int]) -> None:
        self.waiting -= robots
        for robot in sorted(robots):
            picture = self._sketch(robot)
            if picture is None:
                picture = self.env.render(robot)
            self.reels[robot] = _Reel([] if picture is None else [picture])
        self.env.backend.record(sorted(self.reels))

    def _sketch(self, robot: int) -> Picture | None:
        sketch = getattr(self.env.backend, "sketch", None)
        return sketch(robot) if sketch else None


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy(force=True)
