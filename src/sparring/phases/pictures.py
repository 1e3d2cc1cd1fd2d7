"""What a world model foretells beside what came, as pictures."""

import numpy as np
import torch
from tensordict import TensorDict

from sparring.phases.phase import Pictures
from sparring.world_models.world_model import WorldModel

# of a prediction that came to nothing; no scene is of this colour
FAILED = (255, 0, 255)
# pixels of a video for each of a picture
ENLARGED = 3


@torch.no_grad()
def predictions(model: WorldModel, episode: TensorDict, rate: float) -> Pictures:
    """Of an episode `[T]`: a film of every prediction, at `rate` decisions a second, and its middle as an image."""
    model.eval()
    # rounded to bytes, what is no number looks like one
    broken = not all(bool(weight.isfinite().all()) for weight in model.parameters())
    memory = model.empty_memory(1)
    frames = []
    for t in range(len(episode)):
        td = episode[t : t + 1].clone(False).set(("memory", "world_model"), memory)
        predicted = model.predict(td)
        memory = predicted["memory"]
        failed = broken or not all(bool(value.isfinite().all()) for value in predicted.values(True, True))
        frames.append(beside_truth(None if failed else predicted["image"], td["next", "observation", "image"]))
    film = [frame.repeat(ENLARGED, 0).repeat(ENLARGED, 1) for frame in frames]
    return Pictures({"pred_vs_gt": frames[len(frames) // 2]}, {"": film}, rate)


def beside_truth(predicted: TensorDict | None, truth: TensorDict) -> np.ndarray:
    """Images `[1, 3, H, W]` by camera -> `[cameras * H, 2 * W, 3]`: left predicted, right true, a row for each camera.

    A prediction that failed is None, and shown in FAILED.
    """
    rows = []
    for camera, true in truth.items():
        right = _picture(true)
        left = np.full_like(right, FAILED) if predicted is None else _picture(predicted[camera])
        rows.append(np.concatenate([left, right], axis=1))
    return np.concatenate(rows)


def _picture(image: torch.Tensor) -> np.ndarray:
    # [1, 3, H, W] -> [H, W, 3]
    return image[0].permute(1, 2, 0).numpy(force=True)
