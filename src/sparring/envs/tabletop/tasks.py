"""What is asked of the arm: a start, a reward, and when it counts as done.

A task is a frozen record with the members of `Task`; adding one to `TASKS` makes it available everywhere. The backend
knows no task by name. The suffix is the distribution of starts: d0 narrow, d1 wider, d2 most of what can be reached.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple, Protocol

import numpy as np

from sparring.envs.tabletop.scene import ARM_JOINTS, FINGER_TRAVEL, FINGERS, HOME
from sparring.errors import UserError


class Start(NamedTuple):
    """How one episode begins."""

    # [nq] and [3]
    qpos: np.ndarray
    goal: np.ndarray


class Task(Protocol):
    name: str
    instruction: str
    # an episode is a success when `score` was satisfied in each of its last `hold` steps
    hold: int

    def start(self, rng: np.random.Generator) -> Start:
        """Draw the start of one episode."""

    def score(self, hand: np.ndarray, goal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reward `[n]` in [0, 1] and whether the task is satisfied `[n]`, from positions `[n, 3]`."""

    def describe(self) -> dict[str, str]:
        """What varies between episodes, for a person to read."""


@dataclass(frozen=True)
class Reach:
    """Bring the hand to a point in the air and stay there."""

    name: str
    # opposite corners of the box that goals are uniform in, metres from the centre of the table top
    low: tuple[float, float, float]
    high: tuple[float, float, float]
    # radians, each joint uniform around home
    joint_noise: float
    instruction: str = "move the hand to the green ball"
    hold: int = 5
    radius: float = 0.03

    def start(self, rng: np.random.Generator) -> Start:
        qpos = np.full(ARM_JOINTS + FINGERS, FINGER_TRAVEL)
        qpos[:ARM_JOINTS] = HOME + rng.uniform(-self.joint_noise, self.joint_noise, ARM_JOINTS)
        return Start(qpos, rng.uniform(self.low, self.high))

    def score(self, hand: np.ndarray, goal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        offset = hand - goal
        distance = np.sqrt(np.einsum("ni,ni->n", offset, offset))
        satisfied = distance < self.radius
        # the tanh alone is flat far away and small near by: the bonus makes arriving clearly better than hovering
        return 0.7 * (1 - np.tanh(5 * distance)) + 0.3 * satisfied, satisfied

    def describe(self) -> dict[str, str]:
        spans = {axis: f"{lo:+.2f}..{hi:+.2f} m" for axis, lo, hi in zip("xyz", self.low, self.high, strict=True)}
        return {"goal " + axis: span for axis, span in spans.items()} | {"joints": f"home +-{self.joint_noise:g} rad"}


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Reach("reach_d0", low=(-0.16, -0.06, 0.08), high=(-0.04, 0.06, 0.20), joint_noise=0.02),
        Reach("reach_d1", low=(-0.18, -0.14, 0.06), high=(0.00, 0.14, 0.22), joint_noise=0.05),
        Reach("reach_d2", low=(-0.20, -0.24, 0.04), high=(0.02, 0.24, 0.24), joint_noise=0.10),
    )
}


def find(name: str) -> Task:
    if name in TASKS:
        return TASKS[name]
    near = get_close_matches(name, TASKS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(f"env.task={name!r} is no tabletop task; {hint}there are: {', '.join(TASKS)}")


def describe() -> list[tuple[str, str, str]]:
    """Rows (name, what, what varies) of every task."""
    return [
        (task.name, task.instruction, ", ".join(f"{key} {value}" for key, value in task.describe().items()))
        for task in TASKS.values()
    ]
