"""Image similarity and object masks. Images are uint8 `[N, 3, H, W]`; results refer to values in [0, 1]."""

import torch
from tensordict import TensorDict
from torch.nn import functional

CHANGED = 8  # in 1/255: a pixel has changed if one of its colours changes by more than this
# ids of a segmentation: below FIRST_OBJECT background and robot; above LAST_OBJECT the screen and the marker
ROBOT, FIRST_OBJECT, LAST_OBJECT = 2, 3, 253
WINDOW, SIGMA = 11, 1.5
_C1, _C2 = 0.01**2, 0.03**2  # constants of SSIM, for values in [0, 1]


def changed(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return (after.short() - before.short()).abs().amax(1) > CHANGED


def ssim(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`[N]`: structural similarity (Wang et al. 2004), gaussian window of 11 pixels, mean over colours and pixels."""
    a, b = a.double() / 255, b.double() / 255  # [N, 3, H, W]
    mean_a, mean_b = _blur(a), _blur(b)
    # mean of squares minus square of means: by rounding it may be slightly below 0
    var_a, var_b = _blur(a * a) - mean_a**2, _blur(b * b) - mean_b**2
    covariance = _blur(a * b) - mean_a * mean_b
    numerator = (2 * mean_a * mean_b + _C1) * (2 * covariance + _C2)
    return (numerator / ((mean_a**2 + mean_b**2 + _C1) * (var_a + var_b + _C2))).mean((1, 2, 3))


def _blur(x: torch.Tensor) -> torch.Tensor:
    offset = torch.arange(WINDOW, dtype=x.dtype, device=x.device) - WINDOW // 2
    weight = torch.exp(-(offset**2) / (2 * SIGMA**2))
    weight = weight / weight.sum()
    flat = x.flatten(0, 1)[:, None]
    flat = functional.conv2d(flat, weight.view(1, 1, -1, 1))
    flat = functional.conv2d(flat, weight.view(1, 1, 1, -1))
    return flat[:, 0].unflatten(0, x.shape[:2])


class ObjectMasks:
    """Masks of object pixels in the next frame, by the visibility of the objects earlier in the episode."""

    def __init__(self, segmentation: TensorDict):
        episodes, device = len(segmentation), segmentation.device
        self.any_camera = _SeenObjects(episodes, device)
        self.each_camera = {camera: _SeenObjects(episodes, device) for camera, _ in segmentation.items()}
        self.covered = {c: _CoveredObjects((episodes, *ids.shape[-2:]), device) for c, ids in segmentation.items()}

    def update(self, now: TensorDict, after: TensorDict, rows: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
        """Kind of pixels -> camera -> `[n, H, W]` bool of the next frame, for the episodes in `rows` `[E]`.
        covered: now behind the robot, at the object's last visible position; hidden: now visible in no camera, but
        earlier; returning: now not visible in this camera, but earlier."""
        seen_by = self.each_camera.items()
        return {
            "object": {camera: _is_object(after[camera]) for camera in self.each_camera},
            "covered_object": {c: covered.pixels(now[c], after[c], rows) for c, covered in self.covered.items()},
            "hidden_object": self.hidden(now, after, rows),
            "returning_object": {c: seen.hidden({c: now[c]}, {c: after[c]}, rows)[c] for c, seen in seen_by},
        }

    def hidden(self, now: TensorDict, after: TensorDict, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        ids = [{camera: frame[camera] for camera in self.each_camera} for frame in (now, after)]
        return self.any_camera.hidden(ids[0], ids[1], rows)


class _SeenObjects:
    """The objects that were visible so far in each of N episodes; to predict a hidden one, a model needs memory."""

    def __init__(self, episodes: int, device: torch.device | str | None = "cpu"):
        self.ever = torch.zeros(episodes, 256, dtype=torch.bool, device=device)

    def hidden(
        self, now: dict[str, torch.Tensor], after: dict[str, torch.Tensor], rows: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Ids `[n, 1, H, W]` by camera -> `[n, H, W]` bool: pixels of objects visible earlier but not now. Adds the
        objects visible now."""
        ever = self.ever[rows]
        visible = torch.zeros_like(ever)
        for ids in now.values():
            visible.scatter_(1, ids.flatten(1).long(), True)
        self.ever[rows] = ever | visible
        hidden = ever & ~visible  # [n, 256]
        of_hidden = {c: hidden.gather(1, ids.flatten(1).long()).view(ids[:, 0].shape) for c, ids in after.items()}
        return {camera: of_hidden[camera] & _is_object(ids) for camera, ids in after.items()}


class _CoveredObjects:
    """Pixels of a fixed camera at which the robot uncovers the object that was last visible there."""

    def __init__(self, shape: tuple[int, ...], device: torch.device | str | None = "cpu"):
        self.last = torch.zeros(shape, dtype=torch.uint8, device=device)

    def pixels(self, now: torch.Tensor, after: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        last = torch.where(_is_object(now), now[:, 0].to(torch.uint8), self.last[rows])
        self.last[rows] = last
        return _is_object(after) & (now == ROBOT)[:, 0] & (after[:, 0] == last)


def _is_object(ids: torch.Tensor) -> torch.Tensor:
    return ((ids >= FIRST_OBJECT) & (ids <= LAST_OBJECT))[:, 0]
