"""Records episodes into a store, replays them as windows, and compares them with predictions of a world model.

<run folder>/
  episodes/             an EpisodeStore; process 1 has episodes-1/, ...
  generations/0/  1/    held-out episodes, which are never trained on: an EpisodeStore per generation of explorers
"""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict

from sparring.data.batches import BatchBuilder
from sparring.data.episodes import EpisodeRecorder, EpisodeStore
from sparring.data.windows import MixedWindows, SequentialWindows, ShuffledWindows
from sparring.envs.env import Env
from sparring.phases.configs import AdversarialConfig, TeacherConfig
from sparring.processes.distributed import Distributed
from sparring.world_models.world_model import MemoryStateManager, WorldModel

# number of episodes; not a multiple of a usual number of robots or tasks
_SHIFT = 47
Windows = SequentialWindows | ShuffledWindows | MixedWindows
# the colour of a prediction that is not finite, which no env uses
FAILED = (255, 0, 255)


class Replay:
    """An infinite iterator over batches of windows `[B, T]`. Call `refresh` after adding episodes to the store.

    `SequentialWindows` are repeated pass after pass, and the memory after a batch (`memory_after`, written by the world
    model's loss) enters the next batch. Random windows are independent.
    """

    def __init__(self, windows: Windows, batch_size: int, memory_size: int, seed: int, device: torch.device):
        source, size = (_Passes(windows), None) if isinstance(windows, SequentialWindows) else (windows, batch_size)
        self.builder = BatchBuilder(source, size, seed, device)
        self.memory = MemoryStateManager(batch_size, memory_size, device=device) if size is None else None
        self._last: TensorDict | None = None

    def refresh(self) -> None:
        """Drop batches that were made ahead of time without the newest episodes."""
        self.builder.load_state_dict(self.builder.state_dict())

    def __iter__(self) -> "Replay":
        return self

    def __next__(self) -> TensorDict:
        self._keep_memory()
        batch = next(self.builder)
        if self.memory is not None:
            self._last = self.memory.enter(batch)
        return batch

    def close(self) -> None:
        self.builder.close()

    def state_dict(self) -> dict:
        self._keep_memory()
        return {"batches": self.builder.state_dict(), "memory": self.memory.state_dict() if self.memory else None}

    def load_state_dict(self, state: dict) -> None:
        self.builder.load_state_dict(state["batches"])
        if self.memory is not None:
            self.memory.load_state_dict(state["memory"])
        self._last = None

    def _keep_memory(self) -> None:
        """Store the memory after the last batch, which the loss has written by now."""
        if self.memory is not None and self._last is not None:
            self.memory.leave(self._last["memory_after"])
            self._last = None


class _Passes:
    """Repeats the same windows pass after pass."""

    def __init__(self, windows: SequentialWindows):
        self.windows = windows
        self.state_dict, self.load_state_dict = windows.state_dict, windows.load_state_dict

    def __iter__(self) -> Iterator[TensorDict]:
        while True:
            yield from self.windows


class EpisodeReplay:
    """The episode store of a process, the recorder that fills it and the `Replay` of its windows.

    Files are opened at the first step: nothing is written to a run folder before all checks have passed.
    """

    store: EpisodeStore
    recorder: EpisodeRecorder
    batches: Replay
    generations: "Generations"

    def __init__(
        self,
        config: TeacherConfig | AdversarialConfig,
        folder: Path,
        seed: int,
        env: Env,
        distributed: Distributed,
        windows: Callable[[EpisodeStore, int], Windows],
        memory_size: int,
        source: str,
        exclude: Sequence[str] = (),
        held_out: float | None = None,
    ):
        """`windows(store, seed)`: creates the windows to replay. `exclude`: keys that are not recorded.

        `held_out`: the share of episodes held out in `Generations`; None: there are no generations.
        """
        self.config, self.folder, self.env, self.distributed = config, folder, env, distributed
        self.windows, self.memory_size, self.source, self.exclude = windows, memory_size, source, exclude
        self.held_out, self.is_open = held_out, False
        # each process draws its own batches
        self.seed = seed * 1009 + distributed.rank

    def open(self, state: dict | None = None) -> list[str]:
        """Open the files; removes episodes after the checkpoint of `state`. Returns messages about lost episodes."""
        if self.is_open:
            return []
        suffix = f"-{self.distributed.rank}" if self.distributed.rank else ""
        self.store = EpisodeStore(self.folder / f"episodes{suffix}", max_bytes=int(self.config.max_gb * 1e9))
        expected, lost = state["store"]["next_number"] if state else 0, []
        if self.store.next_number < expected:
            # a run that started from a checkpoint of another run
            lost.append(f"the {expected} earlier episodes are not in {self.store.folder}; new ones are collected")
            state = None
        self.store.load_state_dict(state["store"] if state else {"next_number": 0})
        target: Any = self.store
        if self.held_out is not None:
            target = self.generations = Generations(self.store, self.folder / f"generations{suffix}", self.held_out)
            self.generations.load_state_dict(state["generations"] if state else _NO_GENERATION)
        robots, device = self.env.num_envs, self.distributed.device
        self.recorder = EpisodeRecorder(target, robots, self.source, self.env.tasks, exclude=self.exclude)
        windows = self.windows(self.store, self.seed)
        self.batches = Replay(windows, self.config.batch_size, self.memory_size, self.seed, device)
        self.is_open = True
        return lost

    def __len__(self) -> int:
        return len(self.store)

    def add(self, td: TensorDict) -> None:
        self.recorder.add(td)

    def predict_newest(self, model: WorldModel, rate: float) -> "Prediction | None":
        """Returns the prediction of the newest episode by `model`; None: there is no episode yet."""
        if not len(self.store):
            return None
        return Prediction.of(model, self.store.episode(len(self.store) - 1).to(self.env.device), rate)

    def close(self) -> None:
        """End the thread that makes batches and release the locks on folders."""
        if self.is_open:
            self.batches.close()
            if self.held_out is not None:
                self.generations.close()
            self.store.close()

    def state_dict(self) -> dict:
        self.open()
        parts: dict[str, Any] = {"store": self.store, "recorder": self.recorder, "replay": self.batches}
        parts |= {} if self.held_out is None else {"generations": self.generations}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: dict) -> list[str]:
        lost = self.open(state)
        self.batches.load_state_dict(state["replay"])
        self.recorder.load_state_dict(state["recorder"])
        return lost


class Generations:
    """Splits recorded episodes between `train` and held-out stores; an EpisodeRecorder uses it as its store.

    A generation has the held-out episodes of the explorers of some updates, to measure later what was learned.
    """

    def __init__(self, train: EpisodeStore, folder: Path, held_out: float):
        self.train, self.folder, self.held_out = train, folder, held_out
        self.played = 0
        self.number = 0
        self.store = self._open(0)

    def append(self, episode: TensorDict, **info) -> int:
        # evenly spread, but shifted by one every _SHIFT episodes, so that the robots change
        number = self.played + self.played // _SHIFT
        is_held_out = math.floor((number + 1) * self.held_out) > math.floor(number * self.held_out)
        self.played += 1
        return (self.store if is_held_out else self.train).append(episode, **info)

    def begin(self, number: int) -> None:
        """Start generation `number`, to which episodes held out from now on belong."""
        if number != self.number:
            self.store.close()
            self.number, self.store = number, self._open(number)

    def earlier(self) -> Iterator[EpisodeStore]:
        """Yield the stores of earlier generations that have episodes."""
        for number in range(self.number):
            store = EpisodeStore(self.folder / str(number), read_only=True)
            if len(store):
                yield store

    @staticmethod
    @torch.no_grad()
    def errors(model: WorldModel, store: EpisodeStore) -> tuple[float, float]:
        """Returns (then, now): the mean error of the world model at recording time, and of `model`."""
        episodes = [store.episode(i) for i in range(len(store))]
        then = sum(float(episode["judged", "error"].double().sum()) for episode in episodes)
        now, memory = 0.0, model.empty_memory(len(episodes))
        for t in range(max(map(len, episodes))):
            # [K]: the episodes with more than t decisions
            rows = [row for row, episode in enumerate(episodes) if len(episode) > t]
            td: Any = torch.cat([episodes[row][t : t + 1] for row in rows]).to(memory.device)
            scored = model.score(td.set(("memory", "world_model"), memory[rows]))
            memory[rows] = scored["memory"]
            now += float(scored["error"].double().sum())
        return then / store.num_steps, now / store.num_steps

    def close(self) -> None:
        self.store.close()

    def state_dict(self) -> dict:
        return {"played": self.played, "number": self.number, "store": self.store.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Removes later generations, which will be collected again."""
        self.store.close()
        for folder in self.folder.iterdir():
            if folder.name.isdigit() and int(folder.name) > state["number"]:
                shutil.rmtree(folder)
        self.played, self.number = state["played"], state["number"]
        self.store = self._open(self.number)
        self.store.load_state_dict(state["store"])

    def _open(self, number: int) -> EpisodeStore:
        return EpisodeStore(self.folder / str(number))


class NewestEpisode:
    """The newest complete episode of one robot, in memory."""

    def __init__(self) -> None:
        self.complete: TensorDict | None = None
        # the running episode, one part per rollout
        self.parts: list[TensorDict] = []

    def add(self, rollout: TensorDict) -> None:
        """Add transitions `[T]` of the robot, in time order, without a copy."""
        begins, ended = rollout["is_first"].tolist(), rollout["next", "terminated"] | rollout["next", "truncated"]
        start = 0
        for t, ends in enumerate(ended.tolist()):
            if begins[t]:
                # drop an episode that was interrupted
                self.parts, start = [], t
            if ends:
                self._keep(rollout[start : t + 1])
                if self.parts:
                    self.complete = cast(TensorDict, torch.cat(self.parts))  # type: ignore[arg-type]
                self.parts, start = [], t + 1
        self._keep(rollout[start:])

    def _keep(self, part: TensorDict) -> None:
        # skip the rest of an episode without its beginning
        if len(part) and (self.parts or part["is_first"][0]):
            self.parts.append(part)


_NO_GENERATION = {"played": 0, "number": 0, "store": {"next_number": 0}}


@dataclass(frozen=True)
class Prediction:
    """A world model's prediction of an episode of T decisions, each frame from the true frame before it."""

    # camera -> [T, H, W, 3] uint8: frames after each decision; FAILED if the prediction is not finite
    predicted: dict[str, np.ndarray]
    true: dict[str, np.ndarray]
    # [T], [T, A] (the first action of each chunk), [T, S] (S = 0 without a state)
    rewards: np.ndarray
    actions: np.ndarray
    states: np.ndarray
    task: int
    # decisions per second
    rate: float

    @classmethod
    @torch.no_grad()
    def of(cls, model: WorldModel, episode: TensorDict, rate: float) -> "Prediction":
        """Predict an episode `[T]` with `rate` decisions per second."""
        model.eval()
        # checks weights, because frames are bytes, which cannot be NaN
        broken = not all(bool(weight.isfinite().all()) for weight in model.parameters())
        memory = model.empty_memory(1)
        true = {camera: _frames(images) for camera, images in episode["next", "observation", "image"].items()}
        predicted = {camera: np.empty_like(frames) for camera, frames in true.items()}
        for t in range(len(episode)):
            prediction = model.predict(episode[t : t + 1].clone(False).set(("memory", "world_model"), memory))
            memory = prediction["memory"]
            failed = broken or not all(bool(value.isfinite().all()) for value in prediction.values(True, True))
            for camera, frames in predicted.items():
                frames[t] = FAILED if failed else _frames(prediction["image", camera])[0]
        # some envs have no state, or no task index
        state, task = episode["observation"].get("state", None), episode["observation"].get("task", None)
        states = np.zeros((len(episode), 0), np.float32) if state is None else _copied(state.flatten(1))
        rewards, actions = episode["next", "reward"].sum(1).numpy(force=True), _copied(episode["action"][:, 0])
        return cls(predicted, true, rewards, actions, states, 0 if task is None else int(task[0]), rate)

    def frame(self, decision: int) -> np.ndarray:
        """`[cameras * H, 2 * W, 3]`: left the predicted frames, right the true ones, one row per camera."""
        rows = [[self.predicted[camera][decision], self.true[camera][decision]] for camera in self.true]
        return np.concatenate([np.concatenate(row, axis=1) for row in rows])


def _frames(images: torch.Tensor) -> np.ndarray:
    # [T, 3, H, W] -> [T, H, W, 3]
    return _copied(images.permute(0, 2, 3, 1))


def _copied(tensor: torch.Tensor) -> np.ndarray:
    """Returns a copy: episodes are views of a file that may be removed later."""
    return np.array(tensor.numpy(force=True), order="C")
