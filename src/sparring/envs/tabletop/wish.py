"""What an expert wants of the hands; experts.py turns it into actions."""

from typing import NamedTuple

import numpy as np


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
