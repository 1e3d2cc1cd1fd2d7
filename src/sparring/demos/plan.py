"""The plan of a recording: its settings, and the names of the recorded features."""

from dataclasses import dataclass, fields
from typing import Any

from sparring import __version__
from sparring.config.schema import load_config
from sparring.config.text import Setting, read_settings
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop import observe
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.tasks.registry import TASKS, find
from sparring.errors import UserError

# episodes that a process plays at once: enough to keep the simulator busy, with at most a quarter of a GB of frames
_ROBOTS, _BYTES = 16, 2**28
_FREE_TO_DIFFER = {"threads", "video_renderer"}  # these change neither physics nor frames
_ACTIONS = {
    "delta_qpos": [f"joint_step.{k}" for k in range(6)] + ["finger_step"],
    "delta_ee_pos": ["hand_x", "hand_y", "hand_z", "finger_step"],
    "delta_ee": ["hand_x", "hand_y", "hand_z", "turn_x", "turn_y", "turn_z", "finger_step"],
    "qpos": [f"joint.{k}" for k in range(6)] + ["fingers"],
}


@dataclass(frozen=True)
class Plan:
    """All settings that determine the episodes of a dataset. Picklable, for worker processes."""

    env: TabletopConfig
    max_episode_steps: int | None = None
    seed: int = 0
    noise: float = 0.0
    keep_failures: bool = False
    pixel_format: str = "yuv444p"

    def __post_init__(self):
        if not isinstance(self.env, TabletopConfig):
            raise UserError(f"env.name={self.env.name} has no scripted experts; only the built-in tabletop has them")
        if not 0 <= self.noise <= 1:
            raise UserError(f"--noise {self.noise:g}: expected 0 to 1, the standard deviation of the action noise")
        if self.env.cameras and self.env.image_size % 2:
            size = self.env.image_size
            raise UserError(f"env.image_size={size} is odd; a video needs an even image size")
        # the format has no place for these, or readers add them themselves
        for key in ("depth", "segmentation", "pad_state", "pad_action"):
            if getattr(self.env, key):
                raise UserError(f"env.{key} is not recorded; leave it at its default")

    @classmethod
    def of(
        cls, tasks: list[str], file: str | None, settings: list[Setting], noise: float, keep: bool, pixel_format: str
    ) -> "Plan":
        """By default it records all cameras of the robot, and object positions separately from the robot's state."""
        cameras = TASKS[tasks[0]].scene.cameras if tasks[0] in TASKS else ()
        if any(setting.key in ("env.task", "task_name") for setting in settings):
            raise UserError(f"the task is given twice: as {' '.join(tasks)} and as an override; leave the override out")
        given = read_settings(file) if file else []
        others = [s.value for s in [*given, *settings] if s.key == "env.name" and s.value != "tabletop"]
        if others:
            raise UserError(f"env.name={others[-1]} has no scripted experts; only the built-in tabletop has them")
        shown = {"env.cameras": list(cameras), "env.object_state": "privileged"}
        defaults = [Setting(key, value, "default") for key, value in shown.items()]
        # a valid config needs `rollout.n_envs` as a multiple of the tasks; recording has its own number of robots
        asked = [Setting("env.task", tasks, "command line"), Setting("rollout.n_envs", len(tasks), "command line")]
        config = load_config(None, [*defaults, *given, *settings, *asked], inherit=False)
        return cls(config.env, config.rollout.max_episode_steps, config.seed, noise, keep, pixel_format)

    @property
    def steps(self) -> int:
        """The length of the longest episode."""
        return self.max_episode_steps or max(find(name).max_episode_steps for name in self.env.task)

    @property
    def robots(self) -> int:
        """Episodes of a block, played together; a multiple of the number of tasks, which are assigned in turn."""
        # bytes per step; a point has six float32
        seen = 3 * self.env.image_size**2 * len(self.env.cameras) + 24 * self.env.points
        robots = min(_ROBOTS, _BYTES // max(seen * self.steps, 1))
        return max(robots // len(self.env.task), 1) * len(self.env.task)

    def settings(self) -> dict[str, Any]:
        """As JSON; a recording resumes only with equal settings."""
        env = self.env.model_dump(mode="json", exclude=_FREE_TO_DIFFER)
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "env"}
        return {"sparring_version": __version__, "env": env, "control_mode": self.env.control_mode} | own


def entry_names(env: Tabletop) -> dict[str, list[str]]:
    """Feature -> the names of the entries of a recorded state, privileged state and action."""
    actions = _ACTIONS[env.config.control_mode]
    if len(env.mounts) > 1:
        actions = [f"{side}_{name}" for side in ("left", "right") for name in actions]
    return {
        "observation.state": _observed_names(env, robot=True, world=env.config.object_state == "state"),
        "observation.privileged": _observed_names(env, robot=False, world=True),
        "action": actions,
    }


def _observed_names(env: Tabletop, robot: bool, world: bool) -> list[str]:
    now = env.situation()
    blocks = observe.layout(now.objects.shape[1], now.mechanisms.shape[1], len(env.mounts), robot, world)
    names = []
    for name, place in blocks.items():
        size = place.stop - place.start
        names += [name] if size == 1 else [f"{name}.{k}" for k in range(size)]
    return names
