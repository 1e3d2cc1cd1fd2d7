"""The plan of a recording: all settings that determine its episodes."""

from dataclasses import dataclass, fields, replace
from typing import Any

from sparring import __version__
from sparring.config.schema import load_config
from sparring.config.text import Setting, read_settings
from sparring.contract import EnvSpec
from sparring.demos.expert_env import ExpertEnv, make_expert_env
from sparring.envs import SIMS
from sparring.envs.configs import GymConfig, TabletopConfig
from sparring.envs.tabletop.tasks.registry import TASKS
from sparring.errors import UserError

# episodes that a process plays at once: enough to keep the simulator busy, with at most a quarter of a GB of frames
_ROBOTS, _BYTES = 16, 2**28
_GYM_ROBOTS = 4  # they are simulated one after another
# these change neither physics nor frames
_FREE_TO_DIFFER = {"threads", "video_renderer", "vectorize", "workers", "restarts"}


@dataclass(frozen=True)
class Plan:
    """All settings that determine the episodes of a dataset. Picklable, for worker processes."""

    env: TabletopConfig | GymConfig
    max_episode_steps: int | None = None
    seed: int = 0
    noise: float = 0.0
    keep_failures: bool = False
    pixel_format: str = "yuv444p"

    def __post_init__(self):
        if not isinstance(self.env, TabletopConfig | GymConfig):
            raise UserError(f"env.name={self.env.name} has no scripted experts")
        if not 0 <= self.noise <= 1:
            raise UserError(f"--noise {self.noise:g}: expected 0 to 1, the standard deviation of the action noise")
        if isinstance(self.env, GymConfig):
            return
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
        """By default it records all cameras of the built-in robot, and object positions separately from its state."""
        given = read_settings(file) if file else []
        if ":" in tasks[0]:
            if len(tasks) > 1:
                raise UserError(f"{' '.join(tasks)}: only built-in tasks can be recorded together; give one env")
            return cls._of_gymnasium(tasks[0], [*given, *settings], noise, keep, pixel_format)
        cameras = TASKS[tasks[0]].scene.cameras if tasks[0] in TASKS else ()
        if any(setting.key in ("env.task", "task_name") for setting in settings):
            raise UserError(f"the task is given twice: as {' '.join(tasks)} and as an override; leave the override out")
        others = [s.value for s in [*given, *settings] if s.key == "env.name" and s.value != "tabletop"]
        if others:
            raise UserError(f"env.name={others[-1]}: to record another env, write sparring demos {others[-1]}")
        shown = {"env.cameras": list(cameras), "env.object_state": "privileged"}
        defaults = [Setting(key, value, "default") for key, value in shown.items()]
        # a valid config needs `rollout.n_envs` as a multiple of the tasks; recording has its own number of robots
        asked = [Setting("env.task", tasks, "command line"), Setting("rollout.n_envs", len(tasks), "command line")]
        config = load_config(None, [*defaults, *given, *settings, *asked], inherit=False)
        return cls(config.env, config.rollout.max_episode_steps, config.seed, noise, keep, pixel_format)

    @classmethod
    def _of_gymnasium(cls, name: str, settings: list[Setting], noise: float, keep: bool, pixel_format: str) -> "Plan":
        if name.partition(":")[0] in SIMS:
            # adapters take these as arguments
            keys = {f"env.{key}": f"env.kwargs.{key}" for key in ("cameras", "image_size")}
            settings = [replace(each, key=keys.get(each.key, each.key)) for each in settings]
        config = load_config(None, [*settings, Setting("env.name", name, "command line")], inherit=False)
        return cls(config.env, config.rollout.max_episode_steps, config.seed, noise, keep, pixel_format)

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.env.task if isinstance(self.env, TabletopConfig) else (self.env.name,)

    def make_env(self, robots: int) -> ExpertEnv:
        env = make_expert_env(self.env, robots, self.max_episode_steps, self.noise, self.seed)
        for camera, shape in image_shapes(env.spec).items():
            if shape[0] % 2 or shape[1] % 2:
                env.close()
                raise UserError(f"images of {camera} have {shape[0]}x{shape[1]} pixels; a video needs an even size")
        return env

    def robots(self, spec: EnvSpec) -> int:
        """Episodes of a block, played together; a multiple of the number of tasks, which are assigned in turn."""
        if isinstance(self.env, GymConfig):
            return _GYM_ROBOTS
        # bytes per step; a point has six float32
        seen = 3 * self.env.image_size**2 * len(self.env.cameras) + 24 * self.env.points
        robots = min(_ROBOTS, _BYTES // max(seen * spec.max_episode_steps, 1))
        return max(robots // len(self.env.task), 1) * len(self.env.task)

    def settings(self) -> dict[str, Any]:
        """As JSON; a recording resumes only with equal settings."""
        env = self.env.model_dump(mode="json", exclude=_FREE_TO_DIFFER)
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "env"}
        control_mode = getattr(self.env, "control_mode", None)
        return {"sparring_version": __version__, "env": env, "control_mode": control_mode} | own


def image_shapes(spec: EnvSpec) -> dict[str, tuple[int, int]]:
    """Camera -> (height, width)."""
    images = {key: shape for key, (shape, _) in spec.observation.items() if key.startswith("image/")}
    return {key.removeprefix("image/"): (shape[1], shape[2]) for key, shape in images.items()}
