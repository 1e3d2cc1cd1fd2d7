"""The built-in tasks as gymnasium envs `sparring/<task>`. Importing this module registers them, and so does
`import sparring` after gymnasium (`gymnasium.make("sparring:sparring/lift_d0")`). Keyword arguments are the fields of
`TabletopConfig`; `episode_steps` is the time limit. An observation is the state vector, or a dict with `state`, one
`[H, W, 3]` image per camera and the other configured entries (docs/suite.md)."""

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from sparring.contract import EnvSpec
from sparring.envs.backend import Arrays, EpisodeSeeds, drawn
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.scene import CONTROL_HZ
from sparring.envs.tabletop.tasks.registry import register
from sparring.errors import UserError

_BOUND = 20.0  # vector entries are about 1; env checkers require finite bounds


class TabletopGym(gymnasium.Env):
    """One robot. `info["instruction"]` of `reset` is the task in words; `info["success"]` is valid at the end."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": round(CONTROL_HZ)}

    def __init__(
        self, episode_steps: int | None = None, render_mode: str | None = None, id_task: str | None = None, **config
    ):
        self.render_mode = render_mode
        self._backend = _make_backend({"threads": 1, **config}, id_task, 1, episode_steps, render_mode)
        self._backend.record([0] if render_mode else [])
        self._picture: np.ndarray | None = None
        spec = self._backend.spec
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (spec.action_dim,), np.float32)
        self.observation_space = _observation_space(spec)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        observation = self._backend.reset(EpisodeSeeds(int(self.np_random.integers(2**31))))
        self._picture = None
        instruction = self._backend.spec.instructions[observation["task"][0]]
        return _observed_one(observation), {"success": False, "instruction": instruction}

    def step(self, action: np.ndarray):
        # [A] -> [N=1, C=1, A]
        step = self._backend.step(np.asarray(action)[None, None])
        # the backend has already started the next episode
        observation = _observed_one(step.final if len(step.ended) else step.observation)
        self._picture = drawn(step.frames[0][-1]) if self.render_mode else None
        info = {"success": bool(step.success[0])}
        return observation, float(step.reward[0, 0]), bool(step.terminated[0]), bool(step.truncated[0]), info

    def render(self) -> np.ndarray | None:
        if self.render_mode is None:
            return None
        return self._backend.render(0) if self._picture is None else self._picture

    def close(self) -> None:
        self._backend.close()


def _make_backend(settings: dict, id_task: str | None, num_envs: int, steps: int | None, mode: str | None) -> Tabletop:
    """Create the simulator. `id_task`: the task of the gymnasium id; a list of mixed tasks must start with it."""
    if mode not in (None, "rgb_array"):
        raise UserError(f"render_mode={mode!r}: expected None or 'rgb_array'")
    if steps is not None and not (isinstance(steps, int) and steps > 0):
        raise UserError(f"episode_steps={steps!r}: expected a number of steps above 0, or None for the task's default")
    config = TabletopConfig(**({"task": id_task} if id_task else {}) | settings)
    if id_task and config.task[0] != id_task:
        given = f"'sparring/{id_task}' and task={settings['task']!r} name different tasks"
        raise UserError(f"{given}; use the id 'sparring/{config.task[0]}', or remove task")
    return Tabletop(config, num_envs, steps)


def _observation_space(spec: EnvSpec) -> gymnasium.Space:
    spaces: dict[str, gymnasium.Space] = {}
    for name, (shape, dtype) in spec.observation.items():
        # [3, H, W] -> [H, W, 3]
        shape = (*shape[1:], shape[0]) if name.startswith("image/") else shape
        low, high = (0, 255) if dtype == "uint8" else (-_BOUND, _BOUND)
        if name != "task":
            spaces[name.removeprefix("image/")] = gymnasium.spaces.Box(low, high, shape, np.dtype(dtype))
    return spaces["state"] if list(spaces) == ["state"] else gymnasium.spaces.Dict(spaces)


def _observed(arrays: Arrays) -> np.ndarray | dict[str, np.ndarray]:
    entries = {}
    for name, value in arrays.items():
        if name.startswith("image/"):
            entries[name.removeprefix("image/")] = np.ascontiguousarray(value.transpose(0, 2, 3, 1))
        elif name != "task":
            entries[name] = value if value.dtype == np.uint8 else np.clip(value, -_BOUND, _BOUND)
    return entries["state"] if list(entries) == ["state"] else entries


def _observed_one(arrays: Arrays) -> np.ndarray | dict[str, np.ndarray]:
    observed = _observed(arrays)
    return {name: value[0] for name, value in observed.items()} if isinstance(observed, dict) else observed[0]


class TabletopVectorGym(gymnasium.vector.VectorEnv):
    """N robots stepped together: `make_vec("sparring/lift_d0", 16)`. A robot whose episode ends is reset in the same
    step: `infos` has the true last observation (`final_obs`), the outcome (`success`) and the next `instruction`;
    `render()` shows the new episode."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, **TabletopGym.metadata}

    def __init__(
        self,
        num_envs: int = 1,
        episode_steps: int | None = None,
        render_mode: str | None = None,
        id_task: str | None = None,
        **config,
    ):
        self.num_envs, self.render_mode = num_envs, render_mode
        self._backend = _make_backend(config, id_task, num_envs, episode_steps, render_mode)
        spec = self._backend.spec
        self.single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (spec.action_dim,), np.float32)
        self.single_observation_space = _observation_space(spec)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        seeds = EpisodeSeeds(int(self.np_random.integers(2**31)), total_envs=self.num_envs)
        observation = self._backend.reset(seeds)
        return _observed(observation), self._instructions(observation["task"], np.ones(self.num_envs, bool))

    def step(self, actions: np.ndarray):
        # [N, A] -> [N, C=1, A]
        step = self._backend.step(np.asarray(actions)[:, None])
        ended = np.isin(np.arange(self.num_envs), step.ended)
        infos = {"success": step.success, "_success": ended}
        if len(step.ended):
            final = np.full(self.num_envs, None, object)
            for k, env in enumerate(step.ended):
                final[env] = _observed_one({name: value[k : k + 1] for name, value in step.final.items()})
            infos |= {"final_obs": final, "_final_obs": ended} | self._instructions(step.observation["task"], ended)
        return _observed(step.observation), step.reward[:, 0].astype(np.float64), step.terminated, step.truncated, infos

    def render(self) -> list[np.ndarray] | None:
        return [self._backend.render(env) for env in range(self.num_envs)] if self.render_mode else None

    def _instructions(self, phrasing: np.ndarray, started: np.ndarray) -> dict[str, np.ndarray]:
        texts = np.array(self._backend.spec.instructions, object)[phrasing]
        return {"instruction": np.where(started, texts, None), "_instruction": started}  # type: ignore[dict-item]

    def close_extras(self, **kwargs) -> None:
        self._backend.close()


register()
