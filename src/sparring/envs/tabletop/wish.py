"""What an expert wants of the hands, and how a thing is grasped; experts.py turns it into actions."""

from typing import NamedTuple

import numpy as np

from sparring.envs.tabletop.arm import FINGER_TRAVEL


class Wish(NamedTuple):
    """Of n robots: where the hand should go, how it is turned about z, and what the fingers do.

    Of robots with R arms, `[n, R, 3]` and `[n, R]`.
    """

    # [n, 3], [n] rad from how delta_ee_pos holds it, [n] from -1 (close) to 1 (open)
    point: np.ndarray
    yaw: np.ndarray
    grip: np.ndarray
    # [n] at most this part of the fastest step
    speed: np.ndarray


def grasp(
    hand: np.ndarray, grip: np.ndarray, place: np.ndarray, pressed: float, over: float = 0.065
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of hands `[..., 3]` commanded to be open by `grip` `[...]`: above the place `[..., 3]`, down, close.

    Returns where the hand should go `[..., 3]`, what the fingers do `[...]`, and `[...]` bool whether they are around
    the place and, commanded closer than `pressed`, press on what is there. `over` is how far above it the hand comes.
    """
    offset = hand - place
    aside, away = np.linalg.norm(offset[..., :2], axis=-1), np.linalg.norm(offset, axis=-1)
    below = offset[..., 2] < over - 0.02
    point = place.copy()
    point[..., 2] += np.where(aside < np.where(below, 0.02, 0.012), 0.0, over)
    around = away < 0.025
    closing = (away < 0.012) | (around & (grip < 0.9 * FINGER_TRAVEL))
    return point, np.where(closing, -1.0, 1.0), around & (grip < pressed)
