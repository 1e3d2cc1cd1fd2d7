"""Images as a checkpoint's image processor would prepare them, in torch alone."""

from pathlib import Path

import torch
from torch import nn

from sparring.errors import UserError
from sparring.policies.pi0.checkpoint import read_json

# PIL's numbers of the ways to resize
_MODES = {2: "bilinear", 3: "bicubic"}


class ImagePreparation(nn.Module):
    """uint8 [B, 3, H, W] -> float32 [B, 3, size, size]: resized, scaled to about +-1, padded at the right and below.

    A processor that is told height and width stretches; one that is told the most of both keeps the proportions.
    """

    def __init__(self, folder: Path, size: int):
        super().__init__()
        settings = _settings(folder)
        self.size = size
        shape = settings.get("size") or {}
        if not isinstance(shape, dict):
            raise UserError(f"'{folder}': its image processor has size={shape}; expected height and width")
        self.keeps_proportions = "height" not in shape
        asked = (
            shape.get("height") or shape.get("max_height", size),
            shape.get("width") or shape.get("max_width", size),
        )
        if asked != (size, size):
            raise UserError(
                f"'{folder}': its image processor makes images of {asked[0]}x{asked[1]}, its vision model reads "
                f"{size}x{size}"
            )
        resample = settings.get("resample", 3)
        if resample not in tuple(_MODES):
            raise UserError(f"'{folder}': its image processor has resample={resample}; expected 2 or 3")
        self.mode = _MODES[resample]
        (factor,) = _numbers(folder, "rescale_factor", [settings.get("rescale_factor", 1 / 255)], 1)
        mean, std = (
            torch.tensor(_numbers(folder, name, settings.get(name, [0.5] * 3), 3)).view(3, 1, 1)
            for name in ("image_mean", "image_std")
        )
        self.register_buffer("scale", factor / std, persistent=False)
        self.register_buffer("shift", mean / std, persistent=False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        height, width = image.shape[-2:]
        wanted = self._wanted(height, width)
        image = image.float()
        # one direction after the other, with whole numbers in between, as PIL and torchvision do
        image = self._resized(self._resized(image, (height, wanted[1])), wanted)
        image = image * self.scale - self.shift
        return nn.functional.pad(image, (0, self.size - wanted[1], 0, self.size - wanted[0]))

    def _resized(self, image: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        if size == image.shape[-2:]:
            return image
        image = nn.functional.interpolate(image, size, mode=self.mode, antialias=True, align_corners=False)
        return image.add_(0.5).floor_().clamp_(0, 255)

    def _wanted(self, height: int, width: int) -> tuple[int, int]:
        if not self.keeps_proportions:
            return self.size, self.size
        shrink = min(self.size / height, self.size / width)
        return int(height * shrink), int(width * shrink)


def _settings(folder: Path) -> dict:
    """What the checkpoint says of its image processor; nothing where it says nothing: pi0's own."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            settings = read_json(folder / name)
            inner = settings.get("image_processor", settings)
            if not isinstance(inner, dict):
                raise UserError(f"'{folder / name}': image_processor is {inner!r}, expected names with values")
            return inner
    return {}


def _numbers(folder: Path, name: str, given, count: int) -> list[float]:
    if not (isinstance(given, list) and len(given) == count and all(isinstance(x, int | float) for x in given)):
        raise UserError(f"'{folder}': its image processor has {name}={given}; expected numbers, {count} of them")
    return [float(x) for x in given]
