"""What is to be recorded: everything that decides which episodes a dataset holds, and nothing else."""

from dataclasses import dataclass
from typing import Any

from sparring import __version__
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.tasks import find
from sparring.errors import UserError

# episodes that a process plays at once: enough to keep the simulator busy, and their pictures in a quarter of a GB
_ROBOTS, _BYTES = 16, 2**28
# these change neither physics nor pictures
_FREE_TO_DIFFER = {"threads", "video_renderer"}


@dataclass(frozen=True)
class Plan:
    """Picklable: worker processes are given one."""

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
            raise UserError(f"--noise {self.noise:g}: expected 0 to 1, the deviation of what is added to an action")
        if self.env.cameras and self.env.image_size % 2:
            raise UserError(
                f"env.image_size={self.env.image_size} is odd; a video needs an even number of pixels a side"
            )
        # a dataset has no place for them, or readers add them themselves
        for key in ("depth", "segmentation", "pad_state", "pad_action"):
            if getattr(self.env, key):
                raise UserError(f"env.{key} is not recorded; leave it at its default")

    @property
    def steps(self) -> int:
        """The length of the longest episode."""
        return self.max_episode_steps or max(find(name).max_episode_steps for name in self.env.task)

    @property
    def robots(self) -> int:
        """Episodes of a block, which are played together; a multiple of the tasks, which are dealt out in turn."""
        # bytes of a step; a point is six float32
        seen = 3 * self.env.image_size**2 * len(self.env.cameras) + 24 * self.env.points
        robots = min(_ROBOTS, _BYTES // max(seen * self.steps, 1))
        return max(robots // len(self.env.task), 1) * len(self.env.task)

    def settings(self) -> dict[str, Any]:
        """As JSON; a recording goes on only under the same ones."""
        env = self.env.model_dump(mode="json", exclude=_FREE_TO_DIFFER)
        return {
            "sparring_version": __version__,
            "env": env,
            "control_mode": self.env.control_mode,
            "max_episode_steps": self.max_episode_steps,
            "seed": self.seed,
            "noise": self.noise,
            "keep_failures": self.keep_failures,
            "pixel_format": self.pixel_format,
        }
