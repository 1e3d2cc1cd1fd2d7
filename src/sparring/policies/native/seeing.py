"""What the vision encoder does, in the way that is fast on GPUs; nothing is learned here."""

import torch
from torch.nn import functional as F

from sparring.policies.native.vision import VisionEncoder

# numbers of a patch are filled up to so many: rows of 16 bytes in bf16
_MULTIPLE = 8


def see(vision: VisionEncoder, images: torch.Tensor, dtype: torch.dtype, gelu_product) -> torch.Tensor:
    """`vision(images, dtype)`; `gelu_product(x, weight, bias)` is a product with the activation after it."""
    x = cut_and_embedded(vision, images.to(dtype)) + vision.places.to(dtype)
    for block in vision.blocks:
        x = block.mix(x)
        x = x + block.down(gelu_product(block.mlp_norm(x), block.up.weight, block.up.bias))
    return vision.norm(x)


def cut_and_embedded(vision: VisionEncoder, images: torch.Tensor) -> torch.Tensor:
    """`vision.patches` of images [N, 3, S, S] as a product, [N, P, W]: a convolution takes ten times as long."""
    size = vision.patches.kernel_size[0]
    count = images.shape[-1] // size
    # [N, 3, S, S] -> [N, 3, s, p, s, p] -> [N, s, s, 3, p, p] -> [N, P, 3 * p * p]
    cut = images.unflatten(3, (count, size)).unflatten(2, (count, size)).permute(0, 2, 4, 1, 3, 5)
    cut = cut.flatten(3).flatten(1, 2)
    room = -cut.shape[-1] % _MULTIPLE
    return F.linear(F.pad(cut, (0, room)), F.pad(vision.patches.weight.flatten(1), (0, room)), vision.patches.bias)
