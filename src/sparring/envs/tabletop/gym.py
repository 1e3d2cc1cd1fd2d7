"""The tabletop as an ordinary `gymnasium.Env`, one robot, for use with any other library.

    sparring.envs.registration.register()
    env = gymnasium.make("sparring/reach_d0", cameras=("head",), object_state="hidden")

Keyword arguments are the fields of `TabletopConfig`. With no cameras an observation is the state vector; with cameras
it is a dict of `state` and one `[H, W, 3]` image per camera. `info["success"]` is set when an episode ends.
"""

import gymnasium
import numpy as np

from sparring.envs.backend import Arrays, EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.scene import CONTROL_HZ

# entries of the state are about 1; checkers ask for finite bounds
STATE_BOUND = 20.0


class TabletopGym(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": round(CONTROL_HZ)}

    def __init__(self, max_episode_steps: int | None = None, render_mode: str | None = None, **config):
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode={render_mode!r}; expected None or one of {self.metadata['render_modes']}")
        self.render_mode = render_mode
        self._config = TabletopConfig(**{"threads": 1, **config})
        self._backend = Tabletop(self._config, num_envs=1, max_episode_steps=max_episode_steps)
        spec = self._backend.spec
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (spec.action_dim,), np.float32)
        state = gymnasium.spaces.Box(-STATE_BOUND, STATE_BOUND, spec.observation["state"][0], np.float32)
        size = self._config.image_size
        images = {name: gymnasium.spaces.Box(0, 255, (size, size, 3), np.uint8) for name in self._config.cameras}
        self.observation_space = gymnasium.spaces.Dict({"state": state, **images}) if images else state

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        observation = self._backend.reset(EpisodeSeeds(int(self.np_random.integers(2**31))))
        return self._only(observation), {"success": False}

    def step(self, action: np.ndarray):
        # [A] -> [N=1, C=1, A]
        step = self._backend.step(np.asarray(action)[None, None])
        # the backend has begun the next episode; gymnasium shows the end of this one
        observation = self._only(step.final if len(step.ended) else step.observation)
        info = {"success": bool(step.success[0])}
        return observation, float(step.reward[0, 0]), bool(step.terminated[0]), bool(step.truncated[0]), info

    def render(self) -> np.ndarray | None:
        return self._backend.render(0) if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        self._backend.close()

    def _only(self, arrays: Arrays) -> np.ndarray | dict[str, np.ndarray]:
        """The one robot's observation, in gymnasium's shapes."""
        state = np.clip(arrays["state"][0], -STATE_BOUND, STATE_BOUND)
        if not self._config.cameras:
            return state
        images = {name: arrays[f"image/{name}"][0].transpose(1, 2, 0).copy() for name in self._config.cameras}
        return {"state": state, **images}
