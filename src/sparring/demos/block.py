"""Plays the expert for a block of episodes and writes those worth keeping.

Which episodes a block holds follows from its number, and what happens in them from their seeds: any process may record
any block, at any time, and the same bytes come out. A block appears under its name only when it is complete.

    block-000007/numbers.npz     of the kept episodes, one after another (see `Block`)
    block-000007/0-head.mp4      pictures of the first kept one
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from sparring.data.statistics import pixel_counts
from sparring.data.video import encode
from sparring.demos.plan import Plan
from sparring.disk import flush, flush_tree
from sparring.envs.backend import Arrays, EpisodeSeeds
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.experts import Expert


@dataclass(frozen=True)
class Block:
    """A recorded block: K episodes kept of those tried, F steps in all."""

    folder: Path
    # "number", "seed", "task", "success", "length": [K]; "state", "privileged", "action": [F, D]; "points": [F, P, 6];
    # "reward": [F]; "pixels/<camera>": [K, 3, 256], see pixel_counts
    numbers: Arrays

    @property
    def kept(self) -> int:
        return len(self.numbers["number"])

    def clip(self, episode: int, camera: str) -> Path:
        return self.folder / f"{episode}-{camera}.mp4"


def block_folder(folder: Path, number: int) -> Path:
    return folder / f"block-{number:06d}"


def read_block(folder: Path) -> Block | None:
    """None where its numbers cannot be read: it is to be recorded again."""
    try:
        with np.load(folder / "numbers.npz") as file:
            return Block(folder, dict(file))
    except (OSError, EOFError, ValueError, BadZipFile):
        return None


class BlockRecorder:
    """Records blocks of a plan into `folder`; one env, used again and again."""

    def __init__(self, plan: Plan, folder: Path):
        self._plan, self._folder = plan, folder
        self._env = Tabletop(plan.env, plan.robots, plan.max_episode_steps)
        self._expert = Expert(self._env, plan.noise, plan.seed)
        self._vectors = [name for name in ("state", "privileged", "points") if name in self._env.spec.observation]

    def __call__(self, number: int) -> int:
        """Record block `number`; the same number comes back."""
        seeds = EpisodeSeeds(self._plan.seed, first_env=number * self._plan.robots, total_envs=self._plan.robots)
        tracks, lengths, success = self._play(seeds)
        kept = np.flatnonzero(success | self._plan.keep_failures)
        numbers = {
            "number": seeds.first_env + kept,
            "seed": np.array([seeds(int(row), 0) for row in kept], np.int64),
            "task": tracks["task"][0, kept],
            "success": success[kept],
            "length": lengths[kept],
        }
        for name in (*self._vectors, "action", "reward"):
            parts = [tracks[name][: lengths[row], row] for row in kept]
            # an empty first part tells shape and type where nothing is kept
            numbers[name] = np.concatenate([tracks[name][:0, 0], *parts])
        self._write(number, numbers, tracks, lengths, kept)
        return number

    def _play(self, seeds: EpisodeSeeds) -> tuple[Arrays, np.ndarray, np.ndarray]:
        """One episode of every robot: what was seen, done and earned `[T, N, ...]`, and `[N]` lengths and successes."""
        env, steps = self._env, self._env.spec.max_episode_steps
        shapes = env.spec.observation | {"action": ((env.spec.action_dim,), "float32"), "reward": ((), "float32")}
        tracks = {name: np.empty((steps, env.num_envs, *shape), dtype) for name, (shape, dtype) in shapes.items()}
        lengths, success = np.zeros(env.num_envs, np.int64), np.zeros(env.num_envs, bool)
        observation = env.reset(seeds)
        for t in range(steps):
            # what is recorded is exactly what the robots are told
            action = self._expert().astype(np.float32)
            step = env.step(action)
            for name, values in (observation | {"action": action[:, 0], "reward": step.reward[:, 0]}).items():
                tracks[name][t] = values
            # where tasks are mixed, the shorter ones go on with another episode, which is not recorded
            first = step.ended[lengths[step.ended] == 0]
            lengths[first], success[first] = t + 1, step.success[first]
            observation = step.observation
        return tracks, lengths, success

    def _write(self, number: int, numbers: Arrays, tracks: Arrays, lengths: np.ndarray, kept: np.ndarray) -> None:
        target = block_folder(self._folder, number)
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        fps = int(self._env.spec.control_hz)
        for camera in self._plan.env.cameras:
            counts = np.zeros((len(kept), 3, 256), np.int64)
            for k, row in enumerate(kept):
                # [T, 3, H, W] -> [T, H, W, 3]
                frames = tracks[f"image/{camera}"][: lengths[row], row].transpose(0, 2, 3, 1)
                counts[k] = pixel_counts(frames)
                encode(Block(partial, {}).clip(k, camera), frames, fps, self._plan.pixel_format)
            numbers[f"pixels/{camera}"] = counts
        np.savez(partial / "numbers.npz", **numbers)
        flush_tree(partial)
        os.replace(partial, target)
        flush(self._folder)
