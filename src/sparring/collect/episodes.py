"""Which episodes ended, and how they went."""

from dataclasses import dataclass

import numpy as np
import torch

from sparring.envs.backend import Step


@dataclass(frozen=True)
class Episode:
    env: int
    task: int
    reward: float
    steps: int
    success: bool
    # share of its decisions in which the robot touched an object
    contact: float = 0.0


class EpisodeTracker:
    """Adds up rewards and steps per env and tells of every episode that ends."""

    def __init__(self, num_envs: int):
        self.rewards = np.zeros(num_envs)
        self.steps = np.zeros(num_envs, np.int64)
        # decisions, and those with contact
        self.decisions, self.contacts = np.zeros((2, num_envs), np.int64)

    def add(self, step: Step) -> list[Episode]:
        self.rewards += step.reward.sum(1)
        self.steps += step.executed
        self.decisions += 1
        self.contacts += step.contact
        if not len(step.ended):
            return []
        # of the episode that ended: the root's task is already that of the next one
        tasks = step.final.get("task", np.zeros(len(step.ended), np.int64))
        episodes = [
            Episode(
                int(env),
                int(task),
                float(self.rewards[env]),
                int(self.steps[env]),
                bool(step.success[env]),
                float(self.contacts[env] / self.decisions[env]),
            )
            for env, task in zip(step.ended, tasks, strict=True)
        ]
        for sums in self._sums().values():
            sums[step.ended] = 0
        return episodes

    def state_dict(self) -> dict:
        return {name: torch.from_numpy(sums.copy()) for name, sums in self._sums().items()}

    def load_state_dict(self, state: dict) -> None:
        for name, sums in self._sums().items():
            # contacts were not counted in older checkpoints
            sums[:] = state[name].numpy() if name in state else 0

    def _sums(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in ("rewards", "steps", "decisions", "contacts")}
