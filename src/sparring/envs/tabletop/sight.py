"""What the robots see, as observations: images, depth, segmentation and points of the cameras that are asked for."""

import numpy as np

from sparring.envs.backend import Arrays
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.world import World
from sparring.errors import UserError

# what a view is called in observations
_NAMES = {"rgb": "image", "depth": "depth", "segmentation": "segmentation"}


class Sight:
    def __init__(self, config: TabletopConfig, world: World):
        self._config, self._world = config, world
        asked = {"env.depth": config.depth, "env.segmentation": config.segmentation, "env.points": config.points}
        blind = [key for key, value in asked.items() if value and not config.cameras]
        if blind:
            raise UserError(f"no camera to look through for {' and '.join(blind)}; set e.g. env.cameras=[head]")
        if config.noise_screen and not world.has_screen:
            raise UserError("env.noise_screen=true, but only the task explore has a screen; set env.task=explore")
        self._wants = tuple(
            name for name, on in (("rgb", True), ("depth", config.depth), ("segmentation", config.segmentation)) if on
        )

    def spec(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """name -> (shape, dtype) of each observation."""
        size = self._config.image_size
        types = {"rgb": ((3, size, size), "uint8"), "depth": ((1, size, size), "float32")}
        types["segmentation"] = ((1, size, size), "uint8")
        spec = {f"{_NAMES[kind]}/{name}": types[kind] for kind in self._wants for name in self._config.cameras}
        return spec | ({"points": ((self._config.points, 6), "float32")} if self._config.points else {})

    def observe(self, rows: np.ndarray, goal: np.ndarray) -> Arrays:
        """Of these robots with their goals `[n, 3]`."""
        config = self._config
        if not config.cameras:
            return {}
        views = self._world.views(rows, goal, config.cameras, config.image_size, self._wants, config.points)
        seen = {f"{_NAMES[kind]}/{name}": views[f"{kind}/{name}"] for kind in self._wants for name in config.cameras}
        return seen | ({"points": views["points"]} if config.points else {})
