"""Which episodes ended, and how they went."""

from dataclasses import dataclass

import torch
from tensordict import TensorDict


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
        self.rewards = torch.zeros(num_envs, dtype=torch.float64)
        self.steps = torch.zeros(num_envs, dtype=torch.int64)

    def add(self, td: TensorDict) -> list[Episode]:
        following = td["next"]
        self.rewards += following["reward"].sum(-1).cpu()
        self.steps += following["executed"].cpu()
        ended = (following["terminated"] | following["truncated"]).nonzero()[:, 0].tolist()
        if not ended:
            return []
        task = td.get(("observation", "task"), None)
        episodes = [
            Episode(
                env=env,
                task=0 if task is None else int(task[env]),
                reward=float(self.rewards[env]),
                steps=int(self.steps[env]),
                success=bool(following["success"][env]),
            )
            for env in ended
        ]
        self.rewards[ended] = 0
        self.steps[ended] = 0
        return episodes

    def state_dict(self) -> dict:
        return {"rewards": self.rewards.clone(), "steps": self.steps.clone()}

    def load_state_dict(self, state: dict) -> None:
        self.rewards.copy_(state["rewards"])
        self.steps.copy_(state["steps"])
