"""Domain randomisation: what differs between episodes beside the task, each part switched on by its name.

A robot's domain is a function of its episode's seed alone, drawn apart from the task's own start: switching something
on changes no start, and an env that is put back to a saved state finds its domain again.
"""

from dataclasses import replace

import numpy as np

from sparring.envs.tabletop.task import Task
from sparring.envs.tabletop.things import with_clutter

# of a task's scene when clutter is switched on
CLUTTER = 3
# sliding friction is multiplied by a number between these
FRICTION = (0.7, 1.4)
_LOOKS = ("appearance", "background", "light", "camera_pose")
# a second stream of random numbers for the same episode
_STREAM = 1


class Domain:
    def __init__(self, switches: tuple[str, ...], world):
        self._world = world
        self._looks = {name: name in switches for name in _LOOKS}
        self._friction = "friction" in switches

    def begin(self, row: int, seed: int) -> None:
        """Give a robot the domain of the episode with this seed."""
        if self._friction or any(self._looks.values()):
            rng = np.random.default_rng([seed, _STREAM])
            friction = rng.uniform(*FRICTION)
            if self._friction:
                self._world.set_friction(row, friction)
            if any(self._looks.values()):
                self._world.set_look(row, rng, **self._looks)


def cluttered(task: Task, switches: tuple[str, ...]) -> Task:
    """The task, with things about that have nothing to do with it where clutter is switched on."""
    return replace(task, scene=with_clutter(task.scene, CLUTTER)) if "clutter" in switches else task
