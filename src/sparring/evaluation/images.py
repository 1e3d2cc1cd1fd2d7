"""How alike two pictures are. Pictures are uint8 `[N, 3, H, W]`; figures are of values in [0, 1]."""

import math

import torch
from torch.nn import functional

# in 1/255: a pixel one of whose colours changes by more than this has changed
CHANGED = 8
# of a segmentation: below are nothing, scenery and the robot; above LAST_OBJECT the screen and the goal's marker
ROBOT, FIRST_OBJECT, LAST_OBJECT = 2, 3, 253
WINDOW, SIGMA = 11, 1.5
# of SSIM, for values in [0, 1]
_C1, _C2 = 0.01**2, 0.03**2


def squared_error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`[N, H, W]`: of each pixel, the mean over its colours."""
    return ((a.float() - b.float()) / 255).square().mean(1)


def changed(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """`[N, H, W]` bool."""
    return (after.short() - before.short()).abs().amax(1) > CHANGED


def psnr(mse: float) -> float:
    """In dB, of the mean squared error over all pictures: that of single ones is infinite where nothing moves."""
    return math.inf if mse == 0 else -10 * math.log10(mse)


def ssim(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`[N]`: structural similarity (Wang et al. 2004), gaussian window of 11 pixels, mean over colours and places."""
    # [N, 3, H, W]
    a, b = a.double() / 255, b.double() / 255
    mean_a, mean_b = _blur(a), _blur(b)
    # the blur of squares less the square of blurs: rounding may leave a little below 0
    var_a, var_b = _blur(a * a) - mean_a**2, _blur(b * b) - mean_b**2
    covariance = _blur(a * b) - mean_a * mean_b
    alike = (2 * mean_a * mean_b + _C1) * (2 * covariance + _C2)
    return (alike / ((mean_a**2 + mean_b**2 + _C1) * (var_a + var_b + _C2))).mean((1, 2, 3))


def _blur(x: torch.Tensor) -> torch.Tensor:
    """Only where the whole window fits."""
    offset = torch.arange(WINDOW, dtype=x.dtype, device=x.device) - WINDOW // 2
    weight = torch.exp(-(offset**2) / (2 * SIGMA**2))
    weight = weight / weight.sum()
    flat = x.flatten(0, 1)[:, None]
    flat = functional.conv2d(flat, weight.view(1, 1, -1, 1))
    flat = functional.conv2d(flat, weight.view(1, 1, 1, -1))
    return flat[:, 0].unflatten(0, x.shape[:2])


def objects(segmentation: torch.Tensor) -> torch.Tensor:
    """`[N, 1, H, W]` numbers of a segmentation -> `[N, H, W]` bool: pixels of objects."""
    return ((segmentation >= FIRST_OBJECT) & (segmentation <= LAST_OBJECT))[:, 0]


class Seen:
    """Which objects each of N episodes has seen so far, in any camera; then, which pixels are of hidden ones.

    A pixel of the next frame is of a hidden object when no camera shows the object now, but one did earlier in the
    episode: only a memory can know how it looks and where it is.
    """

    def __init__(self, episodes: int, device: torch.device | str = "cpu"):
        self.ever = torch.zeros(episodes, 256, dtype=torch.bool, device=device)

    def hidden(
        self, now: dict[str, torch.Tensor], after: dict[str, torch.Tensor], rows: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Segmentations `[n, 1, H, W]` by camera -> `[n, H, W]` bool of each; remembers what is seen now.

        `rows` [N] bool: which n of the episodes these are.
        """
        ever = self.ever[rows]
        visible = torch.zeros_like(ever)
        for segmentation in now.values():
            visible.scatter_(1, segmentation.flatten(1).long(), True)
        out_of_sight = ever & ~visible
        self.ever[rows] = ever | visible
        return {camera: _looked_up(out_of_sight, segmentation) for camera, segmentation in after.items()}


class Covered:
    """Which pixels of a camera that stands still show an object next that the robot stands in front of now.

    At each place the last object that was seen there: a pixel counts when that very object comes back into view. How it
    looks there is in no picture of now; a memory can know.
    """

    def __init__(self, episodes: int, height: int, width: int, device: torch.device | str = "cpu"):
        self.last = torch.zeros(episodes, height, width, dtype=torch.uint8, device=device)

    def pixels(self, now: torch.Tensor, after: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Segmentations `[n, 1, H, W]` -> `[n, H, W]` bool; remembers what is seen now. `rows` as for `Seen`."""
        last = torch.where(objects(now), now[:, 0].to(torch.uint8), self.last[rows])
        self.last[rows] = last
        return objects(after) & (now == ROBOT)[:, 0] & (after[:, 0] == last)


def _looked_up(table: torch.Tensor, segmentation: torch.Tensor) -> torch.Tensor:
    """`[N, 256]` bool of the numbers in `[N, 1, H, W]`, where they are objects: `[N, H, W]`."""
    picked = table.gather(1, segmentation.flatten(1).long()).view(segmentation[:, 0].shape)
    return picked & objects(segmentation)
