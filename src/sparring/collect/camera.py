"""Films of whole episodes."""

from dataclasses import dataclass

import numpy as np

from sparring.collect.episodes import Episode
from sparring.envs.env import Env


@dataclass(frozen=True)
class Film:
    """The pictures of one recorded episode."""

    frames: list[np.ndarray]
    episode: Episode


class Camera:
    """Films the next whole episode of the first few robots. Nothing is drawn of any other."""

    def __init__(self, env: Env):
        self.env = env
        # robots whose next episode is to be filmed, and the pictures of those that are being filmed
        self.waiting: set[int] = set()
        self.reels: dict[int, list[np.ndarray]] = {}
        self.films: list[Film] = []

    def film(self, robots: int) -> None:
        """Of each of the first so many robots, the next episode that begins."""
        self.waiting |= set(range(min(robots, self.env.num_envs))) - self.reels.keys()

    def all_began(self) -> None:
        """Every robot was reset; an episode that was broken off is not shown."""
        robots = {*self.waiting, *self.reels}
        if robots:
            self._begin(robots)

    def look(self, ended: list[Episode]) -> None:
        """After every step of the env, with the episodes that ended in it."""
        if not (self.waiting or self.reels):
            return
        for robot, frames in self.env.last.frames.items():
            if robot in self.reels:
                self.reels[robot] += frames
        over = [episode for episode in ended if episode.env in self.reels]
        for episode in over:
            frames = self.reels.pop(episode.env)
            self.films += [Film(frames, episode)] if frames else []
        beginning = self.waiting.intersection(self.env.last.ended.tolist())
        if over or beginning:
            self._begin(beginning)

    def drain(self) -> list[Film]:
        """What was filmed since the last call."""
        films, self.films = self.films, []
        return films

    def _begin(self, robots: set[int]) -> None:
        self.waiting -= robots
        for robot in sorted(robots):
            picture = self.env.backend.render(robot)
            self.reels[robot] = [] if picture is None else [picture]
        self.env.backend.record(sorted(self.reels))
