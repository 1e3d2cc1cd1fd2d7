"""Checks of images, depth, segmentation and points, and the contact sheet that shows them."""

from collections.abc import Iterator

import numpy as np

from sparring.check.findings import ERROR, NOTE, WARNING, Finding
from sparring.check.play import Facts
from sparring.record.overlay import contact_sheet

_COLUMNS, _TILE = 6, 128  # moments in the sheet, and the smallest side of a tile
_DARK = 8  # an image whose pixels are all below this is black
_FAR = 100.0  # metres: a depth or a point beyond this is in another unit
# dark blue, blue-green, green, yellow: evenly spaced colours of a colour map
_MAP = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], float)


def picture_findings(facts: Facts) -> Iterator[Finding]:
    shown: dict[str, np.ndarray] = {}
    for name in facts.moments[0][1]:
        # [M, N, ...]
        values = shown[name] = np.stack([moment[name].numpy() for _, moment in facts.moments])
        wrong = _of_picture(name, values)
        still = len(values) > 2 and facts.changed.get("state", 0) and (values == values[:1]).all()
        if wrong is None and still:
            fix = "draw it after every step; right only if the camera does not see the robot"
            wrong = Finding(name, f"the same in {len(values)} moments although the state changes", WARNING, fix)
        for other, theirs in list(shown.items())[:-1]:
            if wrong is None and theirs.shape == values.shape and (theirs == values).all():
                wrong = Finding(name, f"equal to {other} in all moments", WARNING, "draw each from its own camera")
        yield wrong or Finding(name, _range(name, values))


def _of_picture(name: str, values: np.ndarray) -> Finding | None:
    kind, low, high = name.partition("/")[0], values.min(), values.max()
    if kind == "image" and high < _DARK and not (high == 1 and low == 0):
        fix = "check the lights and the GL driver (MUJOCO_GL=egl or osmesa), and that it is drawn after the reset; "
        fix += "a mask is no image: set its role by env.roles"
        return Finding(name, f"black: all pixels are {low} to {high} of 255", ERROR, fix)
    if kind == "image" and high == 1:
        return Finding(
            name, "all pixels are 0 or 1 of 255", ERROR, "return uint8 of 0 to 255: (image * 255).astype(uint8)"
        )
    if kind == "segmentation" and high == 0:
        fix = "check that it sees the robot and the objects; right only if none of them is in view"
        return Finding(name, "shows the background only", NOTE, fix)
    if (values == values[..., :1, :1]).all() and kind != "points":
        return Finding(name, f"a single value ({low:.4g}) in every pixel", ERROR, "check what the camera sees")
    if kind == "points" and (values[..., :3] == values[..., :1, :3]).all():
        return Finding(name, "all points are at one place", ERROR, "check the depth and the intrinsics of the camera")
    metres = values[..., :3] if kind == "points" else values
    if kind in ("depth", "points") and np.abs(metres).max() > _FAR:
        fix = "give metres, and limit what is far away"
        return Finding(name, f"reaches {np.abs(metres).max():,.4g}, expected metres", WARNING, fix)
    if kind == "depth" and low < 0:
        return Finding(name, f"has negative values ({low:.4g})", WARNING, "give the distance from the camera in metres")
    return None


def _range(name: str, values: np.ndarray) -> str:
    if name == "points":
        low, high = (bound(values[..., :3], axis=(0, 1, 2)) for bound in (np.min, np.max))
        return ", ".join(f"{axis} of {a:.2f} to {b:.2f}" for axis, a, b in zip("xyz", low, high, strict=True))
    return f"{values.min():.4g} to {values.max():.4g}, mean {values.mean():.4g}"


def contact_sheet_of(facts: Facts, frames: list[np.ndarray]) -> np.ndarray | None:
    """Rows: what the first robot's cameras show, then frames of its video; columns: moments. None: there is nothing."""
    rows = []
    picks = np.unique(np.linspace(0, len(facts.moments) - 1, _COLUMNS).round().astype(int))
    moments = [facts.moments[pick] for pick in picks]
    for name in facts.moments[0][1]:
        values = np.stack([moment[name][0].numpy() for _, moment in moments])
        label = "points, from above" if name == "points" else name
        pictures = _from_above(values) if name == "points" else _coloured(name, values)
        rows.append(_row(label, pictures, [f"decision {number}" for number, _ in moments]))
    if frames:
        picks = np.unique(np.linspace(0, len(frames) - 1, _COLUMNS).round().astype(int))
        rows.append(_row("video", [frames[pick] for pick in picks], [f"step {pick + 1}" for pick in picks]))
    return contact_sheet(rows) if rows else None


def _row(label: str, pictures: list[np.ndarray], moments: list[str]) -> list[tuple[str, np.ndarray]]:
    times = max(1, -(-_TILE // min(pictures[0].shape[:2])))
    every = -(-max(pictures[0].shape[:2]) // (2 * _TILE))
    enlarged = [picture[::every, ::every].repeat(times, 0).repeat(times, 1) for picture in pictures]
    # the first column also has the name, which needs its width
    title = np.full((enlarged[0].shape[0], 2 * _TILE, 3), 250, np.uint8)
    height, width = pictures[0].shape[:2]
    return [(f"{label} ({width} x {height})", title), *zip(moments, enlarged, strict=True)]


def _coloured(name: str, values: np.ndarray) -> list[np.ndarray]:
    """`[M, 1 or 3, H, W]` -> M pictures `[H, W, 3]`."""
    kind = name.partition("/")[0]
    if kind == "image":
        return list(np.ascontiguousarray(values.transpose(0, 2, 3, 1)))
    if kind == "segmentation":
        colours = np.random.default_rng(3).integers(60, 256, (256, 3)).astype(np.uint8)
        colours[0] = 0
        return list(colours[values[:, 0].astype(int) % 256])
    spread = values.max() - values.min()
    return list(_map((values[:, 0] - values.min()) / (spread or 1)))


def _map(share: np.ndarray) -> np.ndarray:
    """Values of 0 to 1 -> colours."""
    at = np.linspace(0, 1, len(_MAP))
    return np.stack([np.interp(share, at, _MAP[:, channel]) for channel in range(3)], -1).astype(np.uint8)


def _from_above(clouds: np.ndarray) -> list[np.ndarray]:
    """`[M, P, 3 or 6]` -> M pictures with the same scale; the highest points are in front."""
    side, low, high = 160, clouds[..., :3].min((0, 1)), clouds[..., :3].max((0, 1))
    scale = (side - 5) / max(float((high - low)[:2].max()), 1e-6)
    pictures = []
    for cloud in clouds:
        cloud = cloud[np.argsort(cloud[:, 2])]
        column, row = ((cloud[:, :2] - low[:2]) * scale).astype(int).T
        colours = _map((cloud[:, 2] - low[2]) / max(float(high[2] - low[2]), 1e-6))
        if clouds.shape[-1] == 6:
            colours = (cloud[:, 3:] * (255 if clouds[..., 3:].max() <= 1 else 1)).clip(0, 255).astype(np.uint8)
        picture = np.full((side, side, 3), 250, np.uint8)
        for down in range(3):
            for right in range(3):
                picture[side - 4 - row + down, column + right] = colours
        pictures.append(picture)
    return pictures
