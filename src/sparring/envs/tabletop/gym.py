"""The tabletop as an ordinary `gymnasium.Env`, one robot, for use with any other library.

    import sparring.envs.registered
    env = gymnasium.make("sparring/reach_d0", cameras=("head",), object_state="hidden")

Keyword arguments are the fields of `TabletopConfig`. With nothing but the state to observe, an observation is that
vector; else it is a dict: `state`, one `[H, W, 3]` image per camera under its name, and whatever else was asked for
(`privileged`, `depth/<camera>`, `segmentation/<camera>`, `points`, shaped as in docs/suite.md). `info["success"]` is
set when an episode ends; `reset` says in `info["instruction"]` what is asked for. `episode_steps` is the time limit;
gymnasium keeps its own `max_episode_steps` to itself.
"""

import gymnasium
import numpy as np

from sparring.envs.backend import Arrays, EnvSpec, EpisodeSeeds, drawn
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.scene import CONTROL_HZ
from sparring.errors import UserError

# entries of vectors are about 1; checkers ask for finite bounds
BOUND = 20.0


class TabletopGym(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": round(CONTROL_HZ)}

    def __init__(
        self, episode_steps: int | None = None, render_mode: str | None = None, id_task: str | None = None, **config
    ):
        self.render_mode = checked_render_mode(render_mode)
        self._backend = Tabletop(make_config({"threads": 1, **config}, id_task), 1, checked_steps(episode_steps))
        # the last picture of an episode is taken before the backend begins the next one
        self._backend.record([0] if render_mode else [])
        self._picture: np.ndarray | None = None
        spec = self._backend.spec
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (spec.action_dim,), np.float32)
        self.observation_space = observation_space(spec)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        observation = self._backend.reset(EpisodeSeeds(int(self.np_random.integers(2**31))))
        self._picture = None
        instruction = self._backend.spec.instructions[observation["task"][0]]
        return self._only(observation), {"success": False, "instruction": instruction}

    def step(self, action: np.ndarray):
        # [A] -> [N=1, C=1, A]
        step = self._backend.step(np.asarray(action)[None, None])
        # the backend has begun the next episode; gymnasium shows the end of this one
        observation = self._only(step.final if len(step.ended) else step.observation)
        self._picture = drawn(step.frames[0][-1]) if self.render_mode else None
        info = {"success": bool(step.success[0])}
        return observation, float(step.reward[0, 0]), bool(step.terminated[0]), bool(step.truncated[0]), info

    def render(self) -> np.ndarray | None:
        if self.render_mode is None:
            return None
        return self._backend.render(0) if self._picture is None else self._picture

    def close(self) -> None:
        self._backend.close()

    def _only(self, arrays: Arrays) -> np.ndarray | dict[str, np.ndarray]:
        """The one robot's observation."""
        seen = observed(arrays)
        return {name: value[0] for name, value in seen.items()} if isinstance(seen, dict) else seen[0]


def make_config(settings: dict, id_task: str | None) -> TabletopConfig:
    """`id_task` is what the id that gymnasium was given stands for; tasks to be mixed begin with it."""
    config = TabletopConfig(**({"task": id_task} if id_task else {}) | settings)
    if id_task and config.task[0] != id_task:
        given = f"'sparring/{id_task}' and task={settings['task']!r} name different tasks"
        raise UserError(f"{given}; make 'sparring/{config.task[0]}', or leave task out")
    return config


def checked_steps(steps: int | None) -> int | None:
    if steps is not None and not (isinstance(steps, int) and steps > 0):
        raise UserError(f"episode_steps={steps!r}: expected a number of steps above 0, or None for the task's own")
    return steps


def checked_render_mode(mode: str | None) -> str | None:
    if mode not in (None, "rgb_array"):
        raise UserError(f"render_mode={mode!r}: expected None or 'rgb_array'")
    return mode


def observation_space(spec: EnvSpec) -> gymnasium.Space:
    """Of one robot."""
    spaces = {_short(name): _box(name, *kind) for name, kind in spec.observation.items() if name != "task"}
    return spaces["state"] if list(spaces) == ["state"] else gymnasium.spaces.Dict(spaces)


def observed(arrays: Arrays) -> np.ndarray | dict[str, np.ndarray]:
    """What N robots observe, in gymnasium's shapes."""
    seen = {_short(name): _within(name, value) for name, value in arrays.items() if name != "task"}
    return seen["state"] if list(seen) == ["state"] else seen


def _short(name: str) -> str:
    return name.removeprefix("image/")


def _box(name: str, shape: tuple[int, ...], dtype: str) -> gymnasium.spaces.Box:
    if name.startswith("image/"):
        # [3, H, W] -> [H, W, 3]
        shape = (*shape[1:], shape[0])
    low, high = (0, 255) if dtype == "uint8" else (-BOUND, BOUND)
    return gymnasium.spaces.Box(low, high, shape, np.dtype(dtype))


def _within(name: str, value: np.ndarray) -> np.ndarray:
    if name.startswith("image/"):
        return np.ascontiguousarray(value.transpose(0, 2, 3, 1))
    return value if value.dtype == np.uint8 else np.clip(value, -BOUND, BOUND)
