"""N robots as a `gymnasium.vector.VectorEnv`, stepped together: what `make_vec("sparring/lift_d0", 16)` gives.

Episodes restart at once (autoreset mode SAME_STEP): the true last observation of one that ended is in
`infos["final_obs"]`, its outcome in `infos["success"]`; what the next one asks for is in `infos["instruction"]`, as
after `reset`. `render()` shows the episodes that go on from here.
"""

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from sparring.envs.backend import EpisodeSeeds
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.gym import checked_render_mode, checked_steps, make_config, observation_space, observed
from sparring.envs.tabletop.scene import CONTROL_HZ


class TabletopVectorGym(gymnasium.vector.VectorEnv):
    metadata = {
        "autoreset_mode": AutoresetMode.SAME_STEP,
        "render_modes": ["rgb_array"],
        "render_fps": round(CONTROL_HZ),
    }

    def __init__(
        self,
        num_envs: int = 1,
        episode_steps: int | None = None,
        render_mode: str | None = None,
        id_task: str | None = None,
        **config,
    ):
        self.num_envs, self.render_mode = num_envs, checked_render_mode(render_mode)
        self._backend = Tabletop(make_config(config, id_task), num_envs, checked_steps(episode_steps))
        spec = self._backend.spec
        self.single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (spec.action_dim,), np.float32)
        self.single_observation_space = observation_space(spec)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        seeds = EpisodeSeeds(int(self.np_random.integers(2**31)), total_envs=self.num_envs)
        observation = self._backend.reset(seeds)
        return observed(observation), self._instructed(observation["task"], np.ones(self.num_envs, bool))

    def step(self, actions: np.ndarray):
        # [N, A] -> [N, C=1, A]
        step = self._backend.step(np.asarray(actions)[:, None])
        ended = np.isin(np.arange(self.num_envs), step.ended)
        infos = {"success": step.success, "_success": ended}
        if len(step.ended):
            final = np.full(self.num_envs, None, object)
            for k, env in enumerate(step.ended):
                last = observed({name: value[k : k + 1] for name, value in step.final.items()})
                final[env] = {name: value[0] for name, value in last.items()} if isinstance(last, dict) else last[0]
            infos |= {"final_obs": final, "_final_obs": ended} | self._instructed(step.observation["task"], ended)
        return observed(step.observation), step.reward[:, 0].astype(np.float64), step.terminated, step.truncated, infos

    def render(self) -> list[np.ndarray] | None:
        return [self._backend.render(env) for env in range(self.num_envs)] if self.render_mode else None

    def _instructed(self, phrasing: np.ndarray, begun: np.ndarray) -> dict[str, np.ndarray]:
        """What the episodes that have just begun ask for, as gymnasium has it: None elsewhere, and which ones."""
        instructions = np.array(self._backend.spec.instructions, object)[phrasing]
        return {"instruction": np.where(begun, instructions, None), "_instruction": begun}

    def close_extras(self, **kwargs) -> None:
        self._backend.close()
