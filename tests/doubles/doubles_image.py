"""The identity task with camera observations."""

import numpy as np
from doubles import IdentityBackend

from sparring.contract import EnvSpec


class BrightnessBackend(IdentityBackend):
    """Two choices: the image is dark (0) or bright (1)."""

    def __init__(self, num_envs: int):
        super().__init__(num_envs, choices=2)
        self.spec = EnvSpec({"image/head": ((3, 64, 64), "uint8")}, 1, 2, max_episode_steps=8)

    def _draw(self):
        super()._draw()
        level = np.where(self.target, 200, 30).astype(np.uint8)
        return {"image/head": np.broadcast_to(level[:, None, None, None], (self.num_envs, 3, 64, 64)).copy()}
