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


class EpisodeTracker:
    """Adds up rewards and steps per env and tells of every episode that ends."""

    def __init__(self, num_envs: int):
        self.rewards = np.zeros(num_envs)
        self.steps = np.zeros(num_envs, np.int64)

    def add(self, step: Step) -> list[Episode]:
        self.rewards += step.reward.sum(1)
        self.steps += step.executed
        if not len(step.ended):
            return []
        # of the episode that ended: the root's task is already that of the next one
        tasks = step.final.get("task", np.zeros(len(step.ended), np.int64))
        episodes = [
            Episode(int(env), int(task), float(self.rewards[env]), int(self.steps[env]), bool(step.success[env]))
            for env, task in zip(step.ended, tasks, strict=True)
        ]
        self.rewards[step.ended] = 0
        self.steps[step.ended] = 0
        return episodes

    def state_dict(self) -> dict:
        return {"rewards": torch.from_numpy(self.rewards.copy()), "steps": torch.from_numpy(self.steps.copy())}

    def load_state_dict(self, state: dict) -> None:
        self.rewards[:] = state["rewards"].numpy()
        self.steps[:] = state["steps"].numpy()
