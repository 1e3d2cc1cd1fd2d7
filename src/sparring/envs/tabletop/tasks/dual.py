"""Tasks for two arms: lift a tray by both its handles; hand a bar from the left hand to the right hand."""

from dataclasses import dataclass, replace

import numpy as np

from sparring.envs.tabletop.scene import CUBE_HALF, DUAL, RED, Scene, Solid
from sparring.envs.tabletop.tasks import base

# grasp point of a handle relative to the tray's centre, metres along the tray's y and z
_HANDLE_Y, _HANDLE_Z = 0.105, 0.026
_HANDLE_HALF = (0.018, 0.010, 0.020)
TRAY = Solid(
    "tray",
    (0.30, 0.62, 0.70),
    half=(0.06, 0.12, 0.006),
    mass=0.15,
    handles=(((0, _HANDLE_Y, _HANDLE_Z), _HANDLE_HALF), ((0, -_HANDLE_Y, _HANDLE_Z), _HANDLE_HALF)),
)
_CUBE = Solid("red_cube", RED)
BAR = Solid("bar", (0.95, 0.72, 0.15), half=(0.016, 0.10, 0.016))  # along y at yaw 0
BAR_GRIP = 0.065  # metres from the bar's middle to its grasp points
LEFT, RIGHT = 0, 1
_FOOT = 0.085  # least distance of objects from the axis of an arm's base, metres
_OUT_OF_REACH = 0.53  # distance from which on a hand that points down cannot touch the table, metres
_PRESSED = 0.008  # metres; an opening that handles and bar prevent: a finger commanded below it presses on them


@dataclass(frozen=True)
class Area:
    x: tuple[float, float]
    y: tuple[float, float]

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        return np.array([rng.uniform(*self.x), rng.uniform(*self.y)])

    def __str__(self) -> str:
        return f"x {self.x[0]:+.2f}..{self.x[1]:+.2f} m, y {self.y[0]:+.2f}..{self.y[1]:+.2f} m"


@dataclass(frozen=True)
class LiftTray(base.TabletopTask):
    """Lift the tray by its two handles and hold it 8 cm or more above the table, level, with the cube on it."""

    tray: Area
    yaw: float  # degrees to either side; beyond 60 the arms block each other
    offset: float  # largest offset of the cube from the tray's middle along each side of the tray, metres
    scene: Scene = Scene((TRAY, _CUBE), marker=None, arms=DUAL)
    instructions: tuple[str, ...] = (
        "lift the tray with both hands",
        "take the tray by its two handles and raise it",
        "pick up the tray without dropping the cube",
        "use both arms to lift the tray and keep it level",
    )
    max_episode_steps: int = 70
    height: float = 0.08
    reach: base.Sector = base.WIDE  # where an arm can grasp its handle, relative to its base

    def start(self, rng: np.random.Generator) -> base.Start:
        arms, centre, yaw = _arms_and_pose(rng, self, self.tray)
        across, along = _axes(yaw)
        cube = centre + np.sum(rng.uniform(-self.offset, self.offset, (2, 1)) * [across, along], axis=0)
        bottom = 2 * TRAY.half[2]
        objects = np.stack([base.standing(centre, TRAY.half[2], yaw), base.standing(cube, bottom + CUBE_HALF, yaw)])
        return base.Start(arms, np.array([*centre, TRAY.half[2] + self.height + 0.02]), objects)

    def score(self, now: base.Situation) -> tuple[np.ndarray, np.ndarray]:
        risen = now.objects[:, 0, 2] - TRAY.half[2]
        from_handles = np.linalg.norm(now.hands - _handles(now), axis=2)
        held = (from_handles < 0.025) & _gripping(now, 2 * _HANDLE_HALF[0])
        both = held.all(axis=1) & self.carries(now)
        satisfied = both & (risen > self.height)
        near = 1 - np.tanh(8 * from_handles)
        reward = 0.15 * near.mean(axis=1) + 0.15 * held.mean(axis=1)
        reward += both * (0.4 * np.clip(risen / (self.height + 0.02), 0, 1) + 0.3 * satisfied)
        return reward, satisfied

    def carries(self, now: base.Situation) -> np.ndarray:
        """`[n]` bool: the tray is tilted by less than 15 degrees and the cube stands on it."""
        axes, tray = _rotations(now.quats[:, 0]), now.objects[:, 0]
        cube = np.einsum("nij,ni->nj", axes, now.objects[:, 1] - tray)  # in the axes of the tray: [n, 3]
        within = (np.abs(cube[:, :2]) < TRAY.half[:2]).all(axis=1)
        on = np.abs(cube[:, 2] - TRAY.half[2] - CUBE_HALF) < 0.01
        return within & on & (axes[:, 2, 2] > np.cos(np.deg2rad(15)))

    @staticmethod
    def expert(now: base.Situation) -> base.HandTarget:
        places = _handles(now)
        point, grip, held = base.grasp(now.hands, now.grips, places, _PRESSED)
        both = np.asarray(held.all(axis=1, keepdims=True))
        raised = places.copy()
        raised[..., 2] = np.minimum(places[..., 2].min(axis=1) + 0.04, now.goal[:, 2] + 0.03)[:, None]
        axes = _rotations(now.quats[:, 0])
        yaw = np.arctan2(axes[:, 1, 0], axes[:, 0, 0])[:, None]
        yaw, speed = (np.broadcast_to(each, grip.shape) for each in (yaw, np.where(both, 0.6, 1.0)))
        return base.HandTarget(np.where(both[..., None], raised, point), yaw, grip, speed)

    def describe(self) -> dict[str, str]:
        cube = f"within {self.offset:.2f} m of its middle"
        return {"tray": f"{self.tray}, each handle {self.reach}", "yaw": f"+-{self.yaw:g} deg", "cube": cube}

    def reaches(self, centre: np.ndarray, yaw: float) -> bool:
        axes = _axes(yaw)
        for mount, sign in zip(DUAL, (1, -1), strict=True):
            apart = np.maximum(np.abs(axes @ (mount.base[:2] - centre)) - TRAY.half[:2], 0)
            handle = centre + sign * _HANDLE_Y * axes[1]
            if np.hypot(*apart) < _FOOT or not replace(self.reach, base=mount.base).holds(handle):
                return False
        return True


@dataclass(frozen=True)
class Handover(base.TabletopTask):
    """The left hand lifts the bar near one end, the right hand grasps the other end, the left hand releases the bar.
    Satisfied if the right hand holds it 5 cm or more above its start, and the left is open and 6 cm or more away."""

    bar: Area
    yaw: float  # degrees to either side of y; 90 is any yaw
    scene: Scene = Scene((BAR,), marker=None, arms=DUAL)
    instructions: tuple[str, ...] = (
        "hand the yellow bar from the left hand to the right hand",
        "pass the bar over to the right hand",
        "take the bar with the left hand and give it to the right one",
        "pick up the yellow bar on the left and let the right arm take it",
    )
    max_episode_steps: int = 130
    height: float = 0.05
    clear: float = 0.06
    meeting: tuple[float, float, float] = (-0.10, 0.0, 0.16)  # where the bar's middle is during the handover
    reach: base.Sector = base.WIDE  # where the left arm can grasp its end of the bar, relative to its base

    def start(self, rng: np.random.Generator) -> base.Start:
        arms, centre, yaw = _arms_and_pose(rng, self, self.bar)
        return base.Start(arms, np.array(self.meeting), base.standing(centre, BAR.half[2], yaw)[None])

    def score(self, now: base.Situation) -> tuple[np.ndarray, np.ndarray]:
        along, from_bar = _along_bar(now)
        held = (from_bar < 0.025) & _gripping(now, 2 * BAR.half[0])
        lifted = now.objects[:, 0, 2] - BAR.half[2] > self.height
        left, right = held.T
        taken = right & lifted & ~left
        satisfied = taken & (now.widths[:, LEFT] > 0.06) & (from_bar[:, LEFT] > self.clear)

        end = np.where(along[:, LEFT] > 0, 1.0, -1.0) * BAR_GRIP
        near = _nearness(now.hands[:, LEFT], _on_bar(now, end))
        reward = 0.1 * near + left * (0.1 + 0.15 * _nearness(now.objects[:, 0], now.goal))
        reward += left * lifted * (0.1 * _nearness(now.hands[:, RIGHT], _on_bar(now, -end)) + 0.05 * right)
        away = np.clip(from_bar[:, LEFT] / self.clear, 0, 1)
        reward = np.where(taken, 0.6 + 0.2 * away, reward)
        return np.where(satisfied, 1.0, reward), satisfied

    @staticmethod
    def expert(now: base.Situation) -> base.HandTarget:
        along, from_bar = _along_bar(now)
        left, right = ((from_bar < 0.025) & (now.grips < _PRESSED)).T
        axis = _rotations(now.quats[:, 0])[:, :, 1]
        own_yaw = np.arctan2(-axis[:, 0], axis[:, 1])
        # yaw of a hand that grasps the bar; which half of the bar (sign along its y) the left hand grasps: 1 or -1
        bar_yaw = _half_turn(own_yaw)
        end = np.where(left, np.sign(along[:, LEFT]), np.where(np.abs(bar_yaw - own_yaw) < 0.1, 1.0, -1.0))
        places = np.stack([_on_bar(now, end * BAR_GRIP), _on_bar(now, -end * BAR_GRIP)], axis=1)
        take, close, _ = base.grasp(now.hands, now.grips, places, _PRESSED)
        # hands at these points hold the bar's middle at the meeting point
        meet = now.goal[:, None] + [[0, 1, 0], [0, -1, 0]] * np.abs(along)[..., None]
        wait = now.goal + [0.0, -0.22, 0.06]
        low = now.objects[:, 0, 2] < 0.06
        hand = now.hands[:, LEFT]
        bring = np.where(low[:, None], hand + [0, 0, 0.05], meet[:, LEFT])
        # the left hand stays until it is open, then moves straight up, then back a little
        leave = now.goal + [0.0, BAR_GRIP, 0.12]
        leave[:, :2] = np.where(from_bar[:, LEFT, None] < 0.05, hand[:, :2], leave[:, :2])
        leave = np.where((now.widths[:, LEFT] < 0.065)[:, None], hand, leave)
        presented = (np.abs(axis[:, 1]) > np.cos(np.deg2rad(12))) & (base.distance(now.objects[:, 0], now.goal) < 0.03)

        # 0, 1, 2 are take, bring, leave of the left hand and wait, take, keep of the right one
        stages = np.stack([np.where(right, 2, left), np.where(right, 2, left & presented)], axis=1)
        points = [
            np.choose(stages[:, LEFT, None], [take[:, LEFT], bring, leave]),
            np.choose(stages[:, RIGHT, None], [wait, take[:, RIGHT], meet[:, RIGHT]]),
        ]
        grips = [
            np.choose(stages[:, LEFT], [close[:, LEFT], -1.0, 1.0]),
            np.choose(stages[:, RIGHT], [1.0, close[:, RIGHT], -1.0]),
        ]
        yaw = np.where(right | (left & ~low), 0.0, bar_yaw)
        yaws = np.stack([yaw, np.zeros(len(yaw))], axis=1)
        return base.HandTarget(np.stack(points, axis=1), yaws, np.stack(grips, axis=1), np.ones(stages.shape))

    def describe(self) -> dict[str, str]:
        reach = f"its end {self.reach}, out of the right hand's reach"
        return {"bar": f"{self.bar}, {reach}", "yaw": "any" if self.yaw == 90 else f"+-{self.yaw:g} deg"}

    def reaches(self, centre: np.ndarray, yaw: float) -> bool:
        _, along = _axes(_half_turn(yaw))
        ends, feet = centre + np.array([[BAR.half[1]], [-BAR.half[1]]]) * along, np.array([m.base[:2] for m in DUAL])
        nearest = np.clip((feet - centre) @ along, -BAR.half[1], BAR.half[1])[:, None] * along + centre
        from_left, from_right = np.linalg.norm(nearest - feet, axis=1)
        on_table = (np.abs(ends) < [0.48, 0.53]).all()
        takes = replace(self.reach, base=DUAL[LEFT].base).holds(centre + BAR_GRIP * along)
        return bool(on_table and takes and from_left > _FOOT + BAR.half[0] and from_right > _OUT_OF_REACH)


def _arms_and_pose(rng: np.random.Generator, task: LiftTray | Handover, area: Area):
    """Draw both arms near home, and the centre and yaw of an object in the area that the arms can reach."""
    arms = np.stack([base.arm_near_home(rng, task.joint_noise, mount=mount) for mount in DUAL])
    while True:
        centre, yaw = area.draw(rng), np.deg2rad(rng.uniform(-task.yaw, task.yaw))
        if task.reaches(centre, yaw):
            return arms, centre, yaw


def _along_bar(now: base.Situation) -> tuple[np.ndarray, np.ndarray]:
    """Position of each hand along the bar, from its middle, and distance from the bar's axis: `[n, 2]` each."""
    offset, axis = now.hands - now.objects[:, :1], _rotations(now.quats[:, 0])[:, :, 1]
    along = np.clip(np.einsum("nri,ni->nr", offset, axis), -BAR.half[1], BAR.half[1])
    return along, np.linalg.norm(offset - along[..., None] * axis[:, None], axis=2)


def _on_bar(now: base.Situation, along: np.ndarray) -> np.ndarray:
    return now.objects[:, 0] + along[:, None] * _rotations(now.quats[:, 0])[:, :, 1]


def _half_turn(yaw: np.ndarray | float) -> np.ndarray | float:
    """The yaw of the same bar, with its ends swapped or not, in -115..65 degrees, the range of the left wrist."""
    return (yaw + np.deg2rad(115)) % np.pi - np.deg2rad(115)


def _nearness(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return 1 - np.tanh(6 * base.distance(a, b))


def _handles(now: base.Situation) -> np.ndarray:
    offsets = np.array([[0, _HANDLE_Y, _HANDLE_Z], [0, -_HANDLE_Y, _HANDLE_Z]])
    return now.objects[:, :1] + np.einsum("nij,rj->nri", _rotations(now.quats[:, 0]), offsets)


def _gripping(now: base.Situation, thickness: float) -> np.ndarray:
    """`[n, R]` bool: an object of about this thickness keeps the fingers open."""
    held_open = (now.widths > thickness - 0.008) & (now.widths < thickness * np.sqrt(2) + 0.004)
    return held_open & (2 * now.grips < now.widths - 0.008)


def _rotations(quat: np.ndarray) -> np.ndarray:
    one, two = np.split(base.rotation_columns(quat), 2, axis=1)
    return np.stack([one, two, np.cross(one, two)], axis=2)


def _axes(yaw: np.ndarray | float) -> np.ndarray:
    return np.array([[np.cos(yaw), np.sin(yaw)], [-np.sin(yaw), np.cos(yaw)]])
