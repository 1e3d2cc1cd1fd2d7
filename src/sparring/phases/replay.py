"""Replay of recorded episodes, and pictures of predictions on them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

from sparring.data.batches import BatchBuilder, Samples
from sparring.data.windows import SequentialWindows
from sparring.world_models.world_model import MemoryStateManager, WorldModel

# ---- Replay: windows of a store that grows between updates, such that a resumed run sees the same ones.


class Replay:
    """An iterator over batches of windows `[B, T]`, for ever. Call `refresh` when the store has grown.

    From `SequentialWindows` pass follows pass, and the memory after a batch (`memory_after`, which the world model's
    loss writes into it) enters the next one; from windows drawn at random each is for itself.
    """

    def __init__(
        self,
        windows: Samples | SequentialWindows,
        batch_size: int,
        memory_size: int,
        seed: int,
        device: torch.device,
    ):
        in_order = isinstance(windows, SequentialWindows)
        source, drawn = (_Passes(windows), None) if in_order else (windows, batch_size)
        self.builder = BatchBuilder(source, drawn, seed, device)
        self.memory = MemoryStateManager(batch_size, memory_size, device=device) if in_order else None
        self._given: TensorDict | None = None

    def refresh(self) -> None:
        """Drop what was made ahead: those batches were of the store as it used to be."""
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
        """Of the batch before, which has been learned from by now."""
        if self._given is not None:
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


# ---- What a world model foretells beside what came, as pictures.


# of a prediction that came to nothing; no scene is of this colour
FAILED = (255, 0, 255)


@dataclass(frozen=True)
class Foretold:
    """An episode of T decisions as a world model foretells it, each picture from what was true before."""

    # camera -> [T, H, W, 3] uint8: after each decision; all FAILED where the prediction came to nothing
    predicted: dict[str, np.ndarray]
    true: dict[str, np.ndarray]
    # [T], [T, A] (the first of each chunk), [T, S] (S = 0 where no state is seen)
    rewards: np.ndarray
    actions: np.ndarray
    states: np.ndarray
    task: int
    # decisions a second
    rate: float

    def moment(self, decision: int) -> np.ndarray:
        """`[cameras * H, 2 * W, 3]`: left predicted, right true, a row for each camera."""
        rows = [[self.predicted[camera][decision], self.true[camera][decision]] for camera in self.true]
        return np.concatenate([np.concatenate(row, axis=1) for row in rows])


@torch.no_grad()
def foretold(model: WorldModel, episode: TensorDict, rate: float) -> Foretold:
    """Of an episode `[T]`, of `rate` decisions a second."""
    model.eval()
    # rounded to bytes, what is no number looks like one
    broken = not all(bool(weight.isfinite().all()) for weight in model.parameters())
    memory = model.empty_memory(1)
    true = {camera: _pictures(images) for camera, images in episode["next", "observation", "image"].items()}
    predicted = {camera: np.empty_like(pictures) for camera, pictures in true.items()}
    for t in range(len(episode)):
        td = episode[t : t + 1].clone(False).set(("memory", "world_model"), memory)
        prediction = model.predict(td)
        memory = prediction["memory"]
        failed = broken or not all(bool(value.isfinite().all()) for value in prediction.values(True, True))
        for camera, pictures in predicted.items():
            pictures[t] = FAILED if failed else _pictures(prediction["image", camera])[0]
    # not every env shows a state or tells tasks apart
    state, task = episode["observation"].get("state", None), episode["observation"].get("task", None)
    return Foretold(
        predicted,
        true,
        episode["next", "reward"].sum(1).numpy(force=True),
        _copied(episode["action"][:, 0]),
        np.zeros((len(episode), 0), np.float32) if state is None else _copied(state.flatten(1)),
        0 if task is None else int(task[0]),
        rate,
    )


def _pictures(images: torch.Tensor) -> np.ndarray:
    # [T, 3, H, W] -> [T, H, W, 3]
    return _copied(images.permute(0, 2, 3, 1))


def _copied(tensor: torch.Tensor) -> np.ndarray:
    """Episodes are views into a file that may be gone when somebody looks."""
    return np.array(tensor.numpy(force=True), order="C")
