"""Farthest-point sampling on a GPU: one Triton program per cloud. Letters: n clouds, M pixels, F points of the largest
cloud."""

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # points that a program compares at once


def farthest_on_gpu(points: torch.Tensor, inside: torch.Tensor, centre: torch.Tensor, count: int) -> torch.Tensor:
    """Indices `[n, count]` among those `inside` `[n, M]` of points float64 `[n, 3, M]`, by the rule of `point_clouds`;
    without any, arbitrary ones."""
    found = inside.sum(1)
    # [n, M] -> [n, F]: the pixels inside first, in their order
    pixels = torch.argsort(inside.byte(), dim=1, descending=True, stable=True)[:, : max(int(found.max()), 1)]
    cloud = torch.stack([axis.gather(1, pixels) for axis in points.unbind(1)], 1)
    away, chosen = torch.empty_like(cloud[:, 0]), torch.zeros_like(pixels[:, :1]).repeat(1, count)
    # without fused multiply-adds distances are rounded as on a CPU, so that ties are the same
    _farthest[(len(points),)](
        cloud, found, centre.contiguous(), away, chosen, cloud.shape[2], count,
        BLOCK=min(_BLOCK, triton.next_power_of_2(cloud.shape[2])), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    # too few points are repeated
    turn = torch.arange(count, device=points.device) % found.clamp(1, count)[:, None]
    return pixels.gather(1, chosen.gather(1, turn))


@triton.jit
def _farthest(cloud, found, centre, away, chosen, width, count, BLOCK: tl.constexpr):
    """Write to `chosen` [n, count] the order in which points of `cloud` [n, 3, F] are chosen; `away` [n, F]: squared
    distances to the nearest point chosen so far."""
    i = tl.program_id(0).to(tl.int64)
    xs, away, size = cloud + 3 * i * width, away + i * width, tl.load(found + i)
    ys, zs = xs + width, xs + 2 * width
    x, y, z = tl.load(centre + 3 * i), tl.load(centre + 3 * i + 1), tl.load(centre + 3 * i + 2)
    best, at = tl.full((), float("inf"), tl.float64), tl.full((), 0, tl.int64)
    for start in range(0, size, BLOCK):
        k = start + tl.arange(0, BLOCK)
        here = k < size
        dx = tl.load(xs + k, here, 0.0) - x
        dy = tl.load(ys + k, here, 0.0) - y
        dz = tl.load(zs + k, here, 0.0) - z
        squared = tl.where(here, dx * dx + dy * dy + dz * dz, float("inf"))
        least, where = tl.min(squared, 0, return_indices=True)
        at = tl.where(least < best, start + where, at)
        best = tl.minimum(best, least)
        tl.store(away + k, tl.full((BLOCK,), float("inf"), tl.float64), here)
    for p in range(tl.minimum(size, count)):
        tl.store(chosen + i * count + p, at)
        x, y, z = tl.load(xs + at), tl.load(ys + at), tl.load(zs + at)
        best, at = tl.full((), -1.0, tl.float64), tl.full((), 0, tl.int64)
        tl.debug_barrier()  # another thread may have stored the distance that this one loads
        for start in range(0, size, BLOCK):
            k = start + tl.arange(0, BLOCK)
            here = k < size
            dx = tl.load(xs + k, here, 0.0) - x
            dy = tl.load(ys + k, here, 0.0) - y
            dz = tl.load(zs + k, here, 0.0) - z
            squared = tl.minimum(dx * dx + dy * dy + dz * dz, tl.load(away + k, here, 0.0))
            tl.store(away + k, squared, here)
            most, where = tl.max(tl.where(here, squared, -1.0), 0, return_indices=True)
            at = tl.where(most > best, start + where, at)
            best = tl.maximum(best, most)
