"""Episodes that robots play: recorded into a store, replayed as windows, and shown beside what a world model predicts.

<run folder>/
  episodes/             an EpisodeStore; that of process 1 is episodes-1/, ...
  generations/0/  1/    episodes that are never trained on, an EpisodeStore for each stretch of an adversarial run
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

# episodes; no multiple of a usual number of robots or tasks
_SHIFT = 47
Windows = SequentialWindows | ShuffledWindows | MixedWindows
# the colour of a prediction that is not finite; no scene has it
FAILED = (255, 0, 255)


class Replay:
    """An iterator over batches of windows `[B, T]`, for ever. Call `refresh` when the store has grown.

    From `SequentialWindows` pass follows pass, and the memory after a batch (`memory_after`, which the world model's
    loss writes into it) enters the next one; windows drawn at random are independent.
    """

    def __init__(self, windows: Windows, batch_size: int, memory_size: int, seed: int, device: torch.device):
        source, drawn = (_Passes(windows), None) if isinstance(windows, SequentialWindows) else (windows, batch_size)
        self.builder = BatchBuilder(source, drawn, seed, device)
        self.memory = MemoryStateManager(batch_size, memory_size, device=device) if drawn is None else None
        self._given: TensorDict | None = None

    def refresh(self) -> None:
        """Drop batches that were made ahead, of the store as it used to be."""
        self.builder.load_state_dict(self.builder.state_dict())

    def __iter__(self) -> "Replay":
        return self

    def __next__(self) -> TensorDict:
        self._keep_memory()
        batch = next(self.builder)
        if self.memory is not None:
            self._given = self.memory.enter(batch)
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
        self._given = None

    def _keep_memory(self) -> None:
        """Take over the memory after the last batch, which has been learned from by now."""
        if self.memory is not None and self._given is not None:
            self.memory.leave(self._given["memory_after"])
            self._given = None


class _Passes:
    """Pass after pass over the same windows."""

    def __init__(self, windows: SequentialWindows):
        self.windows = windows
        self.state_dict, self.load_state_dict = windows.state_dict, windows.load_state_dict

    def __iter__(self) -> Iterator[TensorDict]:
        while True:
            yield from self.windows


class EpisodeReplay:
    """A store of the episodes of a process, the recorder that fills it and the `Replay` of its windows, as one part.

    It opens nothing before the first step: a run folder is written to only when everything has been found to fit.
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
        """`windows(store, seed)`: what is replayed. `exclude`: keys that are not recorded.

        `held_out`: the share of episodes that go to `Generations` instead; None: there are none.
        """
        self.config, self.folder, self.env, self.distributed = config, folder, env, distributed
        self.windows, self.memory_size, self.source, self.exclude = windows, memory_size, source, exclude
        self.held_out, self.is_open = held_out, False
        # each process draws its own batches
        self.seed = seed * 1009 + distributed.rank

    def open(self, state: dict | None = None) -> list[str]:
        """Remove episodes that came after the checkpoint of `state`. Returns messages about what was lost."""
        if self.is_open:
            return []
        suffix = f"-{self.distributed.rank}" if self.distributed.rank else ""
        self.store = EpisodeStore(self.folder / f"episodes{suffix}", max_bytes=int(self.config.max_gb * 1e9))
        wanted, lost = state["store"]["next_number"] if state else 0, []
        if self.store.next_number < wanted:
            # a run that branched off from another's checkpoint
            lost.append(f"the {wanted} episodes collected so far are not in {self.store.folder}; collects new ones")
            state, wanted = None, 0
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
        """The newest episode as `model` predicts it; None: there is none yet."""
        if not len(self.store):
            return None
        return Prediction.of(model, self.store.episode(len(self.store) - 1).to(self.env.device), rate)

    def close(self) -> None:
        """End the thread that makes batches, and the locks on folders."""
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
    """What an EpisodeRecorder takes for a store: each episode goes to `train`, or is set aside and never trained on.

    A generation is what the explorers of one stretch of a run played, to see later what the world model has learned.
    """

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
        """Episodes set aside from now on belong to this generation."""
        if number != self.number:
            self.store.close()
            self.number, self.store = number, self._open(number)

    def earlier(self) -> Iterator[EpisodeStore]:
        """Generations that are over, where anything was set aside."""
        for number in range(self.number):
            store = EpisodeStore(self.folder / str(number), read_only=True)
            if len(store):
                yield store

    @staticmethod
    @torch.no_grad()
    def errors(model: WorldModel, store: EpisodeStore) -> tuple[float, float]:
        """(then, now): the mean error of the world model that the episodes were played against, and of `model`."""
        episodes = [store.episode(i) for i in range(len(store))]
        then = sum(float(episode["judged", "error"].double().sum()) for episode in episodes)
        now, memory = 0.0, model.empty_memory(len(episodes))
        for t in range(max(map(len, episodes))):
            # [K]: the episodes that last longer than t
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
        """Removes later generations: they will be played again."""
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
    """The newest whole episode of one robot, in memory."""

    def __init__(self) -> None:
        self.whole: TensorDict | None = None
        # what there is of the one that goes on, a part of each rollout
        self.parts: list[TensorDict] = []

    def add(self, rollout: TensorDict) -> None:
        """Transitions `[T]` of the robot, in time order; they are kept."""
        begins, ended = rollout["is_first"].tolist(), rollout["next", "terminated"] | rollout["next", "truncated"]
        start = 0
        for t, ends in enumerate(ended.tolist()):
            if begins[t]:
                # one that was broken off is forgotten
                self.parts, start = [], t
            if ends:
                self._keep(rollout[start : t + 1])
                if self.parts:
                    self.whole = cast(TensorDict, torch.cat(self.parts))  # type: ignore[arg-type]
                self.parts, start = [], t + 1
        self._keep(rollout[start:])

    def _keep(self, part: TensorDict) -> None:
        # the rest of an episode whose beginning is not there is left out
        if len(part) and (self.parts or part["is_first"][0]):
            self.parts.append(part)


_NO_GENERATION = {"played": 0, "number": 0, "store": {"next_number": 0}}


@dataclass(frozen=True)
class Prediction:
    """An episode of T decisions as a world model predicts it, each picture from the true one before."""

    # camera -> [T, H, W, 3] uint8: after each decision; all FAILED where the prediction is not finite
    predicted: dict[str, np.ndarray]
    true: dict[str, np.ndarray]
    # [T], [T, A] (the first of each chunk), [T, S] (S = 0 where no state is seen)
    rewards: np.ndarray
    actions: np.ndarray
    states: np.ndarray
    task: int
    # decisions a second
    rate: float

    @classmethod
    @torch.no_grad()
    def of(cls, model: WorldModel, episode: TensorDict, rate: float) -> "Prediction":
        """Of an episode `[T]`, of `rate` decisions a second."""
        model.eval()
        # rounded to bytes, NaN looks like a number
        broken = not all(bool(weight.isfinite().all()) for weight in model.parameters())
        memory = model.empty_memory(1)
        true = {camera: _pictures(images) for camera, images in episode["next", "observation", "image"].items()}
        predicted = {camera: np.empty_like(pictures) for camera, pictures in true.items()}
        for t in range(len(episode)):
            prediction = model.predict(episode[t : t + 1].clone(False).set(("memory", "world_model"), memory))
            memory = prediction["memory"]
            failed = broken or not all(bool(value.isfinite().all()) for value in prediction.values(True, True))
            for camera, pictures in predicted.items():
                pictures[t] = FAILED if failed else _pictures(prediction["image", camera])[0]
        # not every env shows a state or tells tasks apart
        state, task = episode["observation"].get("state", None), episode["observation"].get("task", None)
        states = np.zeros((len(episode), 0), np.float32) if state is None else _copied(state.flatten(1))
        rewards, actions = episode["next", "reward"].sum(1).numpy(force=True), _copied(episode["action"][:, 0])
        return cls(predicted, true, rewards, actions, states, 0 if task is None else int(task[0]), rate)

    def moment(self, decision: int) -> np.ndarray:
        """`[cameras * H, 2 * W, 3]`: left predicted, right true, a row for each camera."""
        rows = [[self.predicted[camera][decision], self.true[camera][decision]] for camera in self.true]
        return np.concatenate([np.concatenate(row, axis=1) for row in rows])


def _pictures(images: torch.Tensor) -> np.ndarray:
    # [T, 3, H, W] -> [T, H, W, 3]
    return _copied(images.permute(0, 2, 3, 1))


def _copied(tensor: torch.Tensor) -> np.ndarray:
    """A copy: episodes are views into a file that may be gone when somebody looks."""
    return np.array(tensor.numpy(force=True), order="C")
