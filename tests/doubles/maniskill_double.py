"""A double of ManiSkill's env: N robots on a line. An action moves a robot; at 1 the task is solved, at -1 it failed.
Robots start near 0, drawn from torch's global generator, as in ManiSkill's tasks."""

from types import SimpleNamespace

import numpy as np
import torch
from gymnasium import spaces

# names and parameters of what the adapter calls, at commit d80a0ec of github.com/haosulab/ManiSkill (and in 3.0.1)
SIGNATURES = {
    "BaseEnv.reset": ["self", "seed", "options"],
    "BaseEnv.step": ["self", "action"],
    "BaseEnv.get_obs": ["self", "info", "unflattened"],
    "BaseEnv.get_info": ["self"],
    "BaseEnv.render_rgb_array": ["self", "camera_name"],
    "BaseEnv._get_obs_state_dict": ["self", "info"],
    "BaseEnv.close": ["self"],
    "ManiSkillScene.update_render": ["self", "update_sensors", "update_human_render_cameras"],
    "Camera.capture": ["self"],
    "Camera.get_obs": [
        *("self", "rgb", "depth", "position", "segmentation", "normal", "albedo", "apply_texture_transforms"),
    ],
    "Camera.get_params": ["self"],
}


class Camera:
    def __init__(self, env):
        self.env, self.captured = env, 0

    def capture(self):
        self.captured += 1
        self.shown = self.env.x.clone()

    def get_obs(
        self,
        rgb=True,
        depth=True,
        position=True,
        segmentation=True,
        normal=False,
        albedo=False,
        apply_texture_transforms=True,
    ):
        pixels = (100 * self.shown.abs()).to(torch.uint8)[:, None, None, None].expand(-1, 8, 8, 3)
        found = {"rgb": pixels}
        if depth:
            found["depth"] = torch.full((len(self.shown), 8, 8, 1), 1500, dtype=torch.int16)
        return found

    def get_params(self):
        raise NotImplementedError


class ManiSkillScene:
    def __init__(self, env):
        self.sensors = {"base_camera": Camera(env)}

    def update_render(self, update_sensors=True, update_human_render_cameras=True):
        pass


class BaseEnv:
    control_freq = 20
    device = torch.device("cpu")

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.single_action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)
        self.x = torch.zeros(num_envs)
        self.scene, self._hidden_objects = ManiSkillScene(self), [SimpleNamespace(hide_visual=lambda: None)]
        self.resets: list[list[int]] = []

    def reset(self, seed=None, options=None):
        envs = (options or {}).get("env_idx", torch.arange(self.num_envs))
        self.resets.append(envs.tolist())
        if seed is not None:
            torch.manual_seed(seed)
        self.x[envs] = 0.1 * torch.rand(len(envs))
        return self.get_obs(), self.get_info()

    def step(self, action):
        assert action.shape == (self.num_envs, 1)
        self.x = self.x + torch.as_tensor(action)[:, 0]
        info = self.get_info()
        ended = info["success"] | info["fail"]
        return self.get_obs(), self.x.clone(), ended, torch.zeros_like(ended), info

    def get_obs(self, info=None, unflattened=False):
        return torch.stack([self.x, -self.x], 1)

    def get_info(self):
        return {"success": self.x >= 1, "fail": self.x <= -1}

    def _get_obs_state_dict(self, info):
        return {"agent": {"x": self.x[:, None]}}

    def render_rgb_array(self, camera_name=None):
        return (100 * self.x.abs()).to(torch.uint8)[:, None, None, None].expand(-1, 16, 16, 3)

    def close(self):
        pass
