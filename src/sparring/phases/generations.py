"""Generations: what explorers played, a share of it set aside for good, to see later what the world model has learned.

generations/
  0/  1/  2/  ...        an EpisodeStore each, of the explorers of one stretch of the run
"""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from tensordict import TensorDict

from sparring.data.episodes import EpisodeStore
from sparring.world_models.world_model import WorldModel

# episodes; no multiple of a usual number of robots or tasks
_SHIFT = 47


class Generations:
    """What an EpisodeRecorder takes for a store: each episode goes to `train`, or is set aside and never trained on."""

    def __init__(self, train: EpisodeStore, folder: Path, held_out: float):
        self.train, self.folder, self.held_out = train, folder, held_out
        self.played = 0
        self.number = 0
        self.store = self._open(0)

    def append(self, episode: TensorDict, **info) -> int:
        # a share of the episodes, evenly spread, and not always of the same robots: every so often one later
        place = self.played + self.played // _SHIFT
        aside = math.floor((place + 1) * self.held_out) > math.floor(place * self.held_out)
        self.played += 1
        return (self.store if aside else self.train).append(episode, **info)

    def begin(self, number: int) -> None:
        """What is set aside from now on is of this generation."""
        if number != self.number:
            self.store.close()
            self.number, self.store = number, self._open(number)

    def earlier(self) -> Iterator[EpisodeStore]:
        """Those that are over, where anything was set aside."""
        for number in range(self.number):
            store = EpisodeStore(self.folder / str(number), read_only=True)
            if len(store):
                yield store

    def close(self) -> None:
        self.store.close()

    def state_dict(self) -> dict:
        return {"played": self.played, "number": self.number, "store": self.store.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Later generations are forgotten: they will be played again."""
        self.store.close()
        for folder in self.folder.iterdir():
            if folder.name.isdigit() and int(folder.name) > state["number"]:
                shutil.rmtree(folder)
        self.played, self.number = state["played"], state["number"]
        self.store = self._open(self.number)
        self.store.load_state_dict(state["store"])

    def _open(self, number: int) -> EpisodeStore:
        return EpisodeStore(self.folder / str(number))


@torch.no_grad()
def errors_on(model: WorldModel, store: EpisodeStore) -> tuple[float, float]:
    """(then, now): the mean error of the world model that the episodes were played against, and of `model`."""
    episodes = [store.episode(i) for i in range(len(store))]
    then = sum(float(episode["judged", "error"].double().sum()) for episode in episodes)
    now, memory = 0.0, model.empty_memory(len(episodes))
    for t in range(max(map(len, episodes))):
        # [K] of the episodes that have come so far
        rows = [row for row, episode in enumerate(episodes) if len(episode) > t]
        td = torch.cat([episodes[row][t : t + 1] for row in rows]).to(memory.device)
        scored = model.score(td.set(("memory", "world_model"), memory[rows]))
        memory[rows] = scored["memory"]
        now += float(scored["error"].double().sum())
    return then / store.num_steps, now / store.num_steps
