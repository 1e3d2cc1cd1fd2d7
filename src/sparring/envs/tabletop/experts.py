"""Scripted experts, for one arm and for two."""

from numbers import Real
from typing import NamedTuple

import numpy as np

from sparring.envs.tabletop.arm import ARM_JOINTS, FINGER_TRAVEL
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.control import (
    APPROACH,
    FINGER_STEP,
    HAND_STEP,
    JOINT_STEP,
    TURN_STEP,
    HandMover,
    about_z,
)
from sparring.envs.tabletop.tasks.base import Situation, distance
from sparring.envs.tabletop.tasks.dual import (
    BAR_GRIP,
    LEFT,
    RIGHT,
    Handover,
    LiftTray,
    bar_yaw,
    beside_bar,
    handles,
    left_end,
    on_bar,
    rotations,
)
from sparring.envs.tabletop.tasks.manipulate import Lift, Push, PutOn
from sparring.envs.tabletop.tasks.mechanisms import Button, Drawer, cap_top, knob_now
from sparring.envs.tabletop.tasks.reach import Reach
from sparring.errors import UserError
from sparring.noise import keyed_uniform

# ---- What an expert wants of the hands, and how a thing is grasped; experts.py turns it into actions.


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


# ---- What the experts of the two-arm tasks do next; see experts.py, which speaks for them.


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


# ---- Scripted experts: what to do next, read off where everything is now.
#
# expert = Expert(env, noise=0.1)
# while ...:
# step = env.step(expert())
#
# An expert keeps no memory of its own: each decision follows from the positions alone, so it recovers from a slip or
# from
# noise, and goes on from any `set_state`. It sees object poses whether or not the env shows them to the policy. It
# wants
# the hand at a way-point and says so in the env's own control mode, through damped least squares where those are
# joints.


# metres: a cube keeps the fingers further open than this
_CUBE_PRESSED = 0.012


class Expert:
    """Actions `[N, 1, A]` for the robots of `env` as they are now.

    `noise` is the deviation added to each, as a part of the largest step. Where actions are absolute it is added to the
    step that leads to them, in parts of delta_qpos' largest step: the same noise is as many radians in both modes.
    """

    def __init__(self, env: Tabletop, noise: float = 0.0, seed: int = 0):
        if not (isinstance(noise, Real) and 0 <= noise < np.inf):
            raise UserError(f"Expert(noise={noise!r}): expected a number >= 0, a part of the largest step, e.g. 0.1")
        self._env, self._noise, self._seed = env, noise, seed
        self._mover = HandMover(env.mounts)
        self._low, self._high = self._mover.model.jnt_range[:ARM_JOINTS].T
        tasks = env.robot_tasks()
        lost = {task.name for task in tasks if type(task) not in EXPERTS}
        if lost:
            raise UserError(f"there is no expert for {', '.join(sorted(lost))}; choose another of `sparring tasks`")
        # expert -> the robots it guides
        self._rows = {
            expert: np.array([row for row, task in enumerate(tasks) if isinstance(task, kind)], np.int64)
            for kind, expert in EXPERTS.items()
        }

    def __call__(self) -> np.ndarray:
        now = self._env.situation()
        padding = self._env.spec.action_padding
        step = np.zeros((self._env.num_envs, self._env.spec.action_dim - padding))
        for expert, rows in self._rows.items():
            if len(rows):
                step[rows] = self._steps(expert(Situation(*(values[rows] for values in now))), rows)
        if self._noise:
            step += self._noise * self._noise_unit() * keyed_normal(self._seed, self._env.moments(), step.shape[1])
        action = np.clip(step, -1, 1)
        if self._env.config.control_mode == "qpos":
            action = np.clip(self._targets(action), -1, 1)
        return np.pad(action, ((0, 0), (0, padding)))[:, None]

    def _steps(self, wish: Wish, rows: np.ndarray) -> np.ndarray:
        """The wish as steps `[n, R A]` of what the env's control mode moves, 1 is the largest."""
        command, arm = (values[rows] for values in self._env.arms())
        pos, mat = self._mover.where(np.concatenate([command[..., :ARM_JOINTS], arm[..., ARM_JOINTS:]], axis=2))
        down = np.broadcast_to(self._mover.pointing_down, mat.shape)
        # one row per arm: [n, R, ...] -> [n R, ...]
        command, arm, pos = (values.reshape(-1, values.shape[-1]) for values in (command, arm, pos))
        mat, down = mat.reshape(-1, 3, 3), down.reshape(-1, 3, 3)
        point, yaw, grip, speed = wish.point.reshape(-1, 3), *(values.reshape(-1) for values in wish[1:])
        return self._arm_steps(Wish(point, yaw, grip, speed), command, arm, pos, mat, down).reshape(len(rows), -1)

    def _arm_steps(self, wish: Wish, command, arm, pos, mat, down) -> np.ndarray:
        """The same `[m, A]` of m arms that are commanded to be at `pos` with axes `mat`."""
        scale, mode = self._env.config.action_scale, self._env.config.control_mode
        move = _at_most(wish.point - pos, HAND_STEP * wish.speed * scale)
        turn = _at_most(_turn(mat, about_z(wish.yaw) @ down), np.full(len(pos), TURN_STEP * scale))
        grip = wish.grip[:, None]
        if mode == "delta_ee_pos":
            return np.concatenate([move / (HAND_STEP * scale), grip], axis=1)
        if mode == "delta_ee":
            return np.concatenate([move / (HAND_STEP * scale), turn / (TURN_STEP * scale), grip], axis=1)
        joints = self._mover.turned(command, arm, np.concatenate([move, turn], axis=1))
        # near the way-point slower rather than in another direction; far from it, each joint as fast as it can
        fastest = self._joint_step()
        slowed = joints / np.maximum(np.abs(joints).max(axis=1, keepdims=True) / fastest, 1)
        far = distance(wish.point, pos)[:, None] > 0.06
        joints = np.where(far, np.clip(joints, -fastest, fastest), slowed)
        return np.concatenate([joints / fastest, grip], axis=1)

    def _targets(self, step: np.ndarray) -> np.ndarray:
        """Steps `[N, R A]` of the joints and fingers to where they lead, -1 and 1 are the limits."""
        command, _ = self._env.arms()
        # [N, R A] -> [N, R, A]
        step = step.reshape(command.shape)
        joints = command[..., :ARM_JOINTS] + step[..., :ARM_JOINTS] * self._joint_step()
        opening = command[..., -1:] + step[..., -1:] * FINGER_STEP * self._env.config.action_scale
        part = (joints - self._low) / (self._high - self._low)
        return 2 * np.concatenate([part, opening / FINGER_TRAVEL], axis=2).reshape(len(step), -1) - 1

    def _noise_unit(self) -> np.ndarray:
        """`[R A]`: what noise of 1 is as a part of the largest step."""
        if self._env.config.control_mode != "qpos":
            return np.ones(1)
        return np.tile([1 / APPROACH] * ARM_JOINTS + [1.0], len(self._env.mounts))

    def _joint_step(self) -> float:
        """Radians of the largest step of a joint."""
        config = self._env.config
        return JOINT_STEP * config.action_scale * (APPROACH if config.control_mode == "qpos" else 1)


def reach(now: Situation) -> Wish:
    n = len(now.hand)
    return Wish(now.goal, np.zeros(n), np.zeros(n), np.ones(n))


def lift(now: Situation) -> Wish:
    """Above the cube, down, close, up."""
    cube = now.objects[:, 0]
    point, grip, held = grasp(now.hand, now.grip, cube, pressed=_CUBE_PRESSED)
    point[held] = np.stack([now.hand[held, 0], now.hand[held, 1], now.goal[held, 2] + 0.02], axis=1)
    return Wish(point, _face(now.quats[:, 0]), grip, np.ones(len(cube)))


def push(now: Situation) -> Wish:
    """Behind the cube, down, then along the line from the cube to the disc."""
    cube, n = now.objects[:, 0], len(now.hand)
    way = now.goal[:, :2] - cube[:, :2]
    left = np.linalg.norm(way, axis=1, keepdims=True)
    way = way / np.maximum(left, 1e-3)
    hand = now.hand[:, :2] - cube[:, :2]
    along, aside = np.einsum("ni,ni->n", hand, way), hand[:, 0] * way[:, 1] - hand[:, 1] * way[:, 0]
    behind = cube[:, :2] - 0.052 * way
    low, off = now.hand[:, 2] < 0.05, distance(now.hand[:, :2], behind)

    # up where it is in the way, then over to behind the cube, then down
    high = now.hand[:, 2] > 0.06
    xy = np.where(high[:, None], behind, now.hand[:, :2])
    z = np.where(off < 0.015, 0.022, 0.08)
    ready = low & (along < -0.02) & (np.abs(aside) < 0.016)
    # the cube's centre stays about 3.4 cm before the hand's
    pushing = cube[:, :2] + (np.minimum(left, 0.04) - 0.034) * way
    xy, z = np.where(ready[:, None], pushing, xy), np.where(ready, 0.022, z)
    done = left[:, 0] < 0.012
    xy = np.where(done[:, None], now.hand[:, :2], xy)
    return Wish(np.concatenate([xy, z[:, None]], axis=1), np.zeros(n), -np.ones(n), np.ones(n))


def put_on(now: Situation) -> Wish:
    """Grasp, up, over, down, let go, up."""
    cube, target, offset = now.objects[:, 0], now.goal.copy(), now.hand - now.objects[:, 0]
    target[:, :2] = now.objects[:, 1, :2]
    point, grip, held = grasp(now.hand, now.grip, cube, pressed=_CUBE_PRESSED)
    aside, height = distance(cube[:, :2], target[:, :2]), cube[:, 2] - target[:, 2]
    # straight up until it clears what it goes on, then over, then down
    clear = height > 0.015
    carry = np.where(clear[:, None], target, cube)
    carry[:, 2] = target[:, 2] + np.where(aside < 0.008, 0.0, 0.035)
    point = np.where(held[:, None], carry + offset, point)

    there = (aside < 0.015) & (np.abs(height) < 0.005)
    let_go = now.width > 0.07
    away = now.hand.copy()
    away[:, 2] = np.where(let_go, target[:, 2] + 0.08, away[:, 2])
    point, grip = np.where(there[:, None], away, point), np.where(there, 1.0, grip)
    speed = np.where(held & (aside < 0.02), 0.5, 1.0)
    return Wish(point, _face(now.quats[:, 0]), grip, speed)


def press(now: Situation) -> Wish:
    """Over the cap, down, and a little further than it has to go."""
    n, cap = len(now.hand), cap_top(now)
    over = distance(now.hand[:, :2], cap[:, :2]) < 0.012
    point = cap.copy()
    point[:, 2] = np.where(over, now.goal[:, 2], cap[:, 2] + 0.04)
    return Wish(point, np.zeros(n), -np.ones(n), np.ones(n))


def open_drawer(now: Situation) -> Wish:
    """Above the knob, down, close, and along the drawer's way."""
    knob = knob_now(now)
    point, grip, held = grasp(now.hand, now.grip, knob, pressed=0.010, over=0.055)
    point = np.where(held[:, None], now.goal, point)
    return Wish(point, np.zeros(len(knob)), grip, np.where(held, 0.6, 1.0))


EXPERTS = {
    Reach: reach,
    Lift: lift,
    Push: push,
    PutOn: put_on,
    Button: press,
    Drawer: open_drawer,
    Handover: handover,
    LiftTray: lift_tray,
}


def _face(quat: np.ndarray) -> np.ndarray:
    """`[n]`: the smallest turn about z that aligns the fingers with two faces of a cube."""
    yaw = 2 * np.arctan2(quat[:, 3], quat[:, 0])
    return (yaw + np.pi / 4) % (np.pi / 2) - np.pi / 4


def _turn(mat: np.ndarray, target: np.ndarray) -> np.ndarray:
    """`[n, 3]`: half the rotation vector that takes axes `[n, 3, 3]` to others."""
    return 0.25 * np.cross(mat, target, axis=1).sum(axis=2)


def keyed_normal(seed: int, moments: np.ndarray, size: int) -> np.ndarray:
    """`[N, size]` standard normal numbers that depend on each robot's own moment only, not on who else there is."""
    one, other = np.split(keyed_uniform(seed, moments, np.zeros(1), 2 * size)[0].astype(np.float64), 2, axis=1)
    return np.sqrt(-2 * np.log(one)) * np.cos(2 * np.pi * other)


def _at_most(vectors: np.ndarray, length: np.ndarray) -> np.ndarray:
    size = np.linalg.norm(vectors, axis=1)
    return vectors * np.minimum(1, length / np.maximum(size, 1e-9))[:, None]
