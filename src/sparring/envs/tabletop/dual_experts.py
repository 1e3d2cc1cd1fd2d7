"""What the experts of the two-arm tasks do next; see experts.py, which speaks for them."""

import numpy as np

from sparring.envs.tabletop.dual import BAR_GRIP, LEFT, RIGHT, bar_yaw, beside_bar, handles, left_end, on_bar, rotations
from sparring.envs.tabletop.task import Situation, distance
from sparring.envs.tabletop.wish import Wish, grasp

# metres: handles and bar keep the fingers further open than this
_PRESSED = 0.008


def lift_tray(now: Situation) -> Wish:
    """Each hand above its handle, down, close; once both hold, up together."""
    places = handles(now)
    point, grip, held = grasp(now.hands, now.grips, places, _PRESSED)
    both = held.all(axis=1, keepdims=True)
    raised = places.copy()
    # from the lower end on, so that the tray stays level
    raised[..., 2] = np.minimum(places[..., 2].min(axis=1) + 0.04, now.goal[:, 2] + 0.03)[:, None]
    axes = rotations(now.quats[:, 0])
    yaw = np.arctan2(axes[:, 1, 0], axes[:, 0, 0])[:, None]
    return Wish(
        np.where(both[..., None], raised, point),
        np.broadcast_to(yaw, grip.shape),
        grip,
        np.broadcast_to(np.where(both, 0.6, 1.0), grip.shape),
    )


def handover(now: Situation) -> Wish:
    """Left: take the bar, bring it to the middle, leave. Right: wait, take its other end, keep it."""
    along, from_bar = beside_bar(now)
    left, right = ((from_bar < 0.025) & (now.grips < _PRESSED)).T
    take, close = _grasp_ends(now, np.where(left, np.sign(along[:, LEFT]), left_end(now)))
    # of a hand that holds the bar, so that the bar's middle is at the meeting point
    meet = now.goal[:, None] + [[0, 1, 0], [0, -1, 0]] * np.abs(along)[..., None]
    wait = now.goal + [0.0, -0.22, 0.06]
    low = now.objects[:, 0, 2] < 0.06
    bring = np.where(low[:, None], now.hands[:, LEFT] + [0, 0, 0.05], meet[:, LEFT])

    # 0, 1, 2 are take, bring, leave of the left hand and wait, take, keep of the right one
    stages = np.stack([np.where(right, 2, left), np.where(right, 2, left & _presented(now))], axis=1)
    points = [
        np.choose(stages[:, LEFT, None], [take[:, LEFT], bring, _leave(now, from_bar[:, LEFT])]),
        np.choose(stages[:, RIGHT, None], [wait, take[:, RIGHT], meet[:, RIGHT]]),
    ]
    grips = [
        np.choose(stages[:, LEFT], [close[:, LEFT], -1.0, 1.0]),
        np.choose(stages[:, RIGHT], [1.0, close[:, RIGHT], -1.0]),
    ]
    # the left hand turns with the bar as it lies, and back once it has lifted it
    yaw = np.where(right | (left & ~low), 0.0, bar_yaw(now))
    return Wish(
        np.stack(points, axis=1),
        np.stack([yaw, np.zeros(len(yaw))], axis=1),
        np.stack(grips, axis=1),
        np.ones(stages.shape),
    )


def _grasp_ends(now: Situation, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the left hand at the bar's end on the side `end` `[n]` of its own y, and the right hand at the other one."""
    places = np.stack([on_bar(now, end * BAR_GRIP), on_bar(now, -end * BAR_GRIP)], axis=1)
    return grasp(now.hands, now.grips, places, _PRESSED)[:2]


def _presented(now: Situation) -> np.ndarray:
    """`[n]` bool: the bar is at the meeting point and lies across."""
    straight = np.abs(rotations(now.quats[:, 0])[:, 1, 1]) > np.cos(np.deg2rad(12))
    return straight & (distance(now.objects[:, 0], now.goal) < 0.03)


def _leave(now: Situation, from_bar: np.ndarray) -> np.ndarray:
    """`[n, 3]`: the left hand stays until it is open, goes straight up, then a little back."""
    hand, high = now.hands[:, LEFT], now.goal + [0.0, BAR_GRIP, 0.12]
    high[:, :2] = np.where(from_bar[:, None] < 0.05, hand[:, :2], high[:, :2])
    return np.where((now.widths[:, LEFT] < 0.065)[:, None], hand, high)
