"""What a world model foretells beside what came, as pictures."""

from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

from sparring.world_models.world_model import WorldModel

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
