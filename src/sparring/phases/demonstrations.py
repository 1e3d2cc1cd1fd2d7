"""Opens the demonstrations of `imitate.demos`, for an env or without any (env.name=dataset)."""

import math

import numpy as np
import torch

from sparring.config.schema import Config
from sparring.config.section import Section
from sparring.contract import EnvSpec
from sparring.data.dataset import Dataset, DatasetError
from sparring.data.demonstrations import Demonstrations
from sparring.data.mapping import POINTS, PRIVILEGED, STATE
from sparring.envs.configs import DatasetConfig
from sparring.envs.env import Env, make_env
from sparring.envs.recorded import Recorded
from sparring.phases.configs import ImitateConfig
from sparring.policies.policy import Policy

_TEXT_BYTES = 256  # of an instruction; longer ones take multiples of it


def make_imitation_env(config: Config, device: str | torch.device = "cpu") -> Env:
    """An env with the observations and actions to imitate; with env.name=dataset it has no simulator."""
    if not isinstance(config.env, DatasetConfig):
        return make_env(config.env, 1, config.rollout.max_episode_steps, device)
    bare = [Demonstrations(folder, keys=config.imitate.keys) for folder in config.imitate.demos]
    datasets = [demos.dataset for demos in bare]
    env = Env(Recorded(config.env, spec=_spec_of(bare, config.env), datasets=datasets), device)
    env.config = config.env
    return env


def open_demonstrations(config: Config, env: Env, policy: Policy | None = None) -> list[Demonstrations]:
    """The demonstrations for an env; images of the cameras that `policy` reads are decoded (None: no images are)."""
    spec, cameras = env.spec, None if policy is None else cameras_of(policy)
    if cameras is None:
        cameras = [name.removeprefix("image/") for name in spec.observation if name.startswith("image/")]
    sources = env.backend.datasets if isinstance(env.backend, Recorded) else config.imitate.demos
    settings = config.env, spec, config.imitate, cameras
    found = [_open(source, *settings, cache=policy is not None) for source in sources]
    _check_padded_states(found, config.env)
    return found


def cameras_of(policy: Policy) -> list[str]:
    """The cameras that the policy reads: images of others are not decoded."""
    return list(dict.fromkeys(key[2] for key in policy.in_keys if key[:2] == ("observation", "image")))


def _open(
    source: str | Dataset,
    env_config: Section,
    spec: EnvSpec,
    imitate: ImitateConfig,
    cameras: list[str],
    cache: bool,
) -> Demonstrations:
    """Open a dataset; raises DatasetError with the differences if it does not fit the env."""
    # the config of a third-party env may have neither control_mode nor pad_state
    padded = getattr(env_config, "pad_state", 0)
    expected: dict = {"action_dim": spec.action_dim - spec.action_padding}
    if spec.has_control_hz and imitate.fps != "ignore":
        expected |= {"fps": spec.control_hz, "resample": imitate.fps == "resample"}
    if "state" in spec.observation and not padded:
        expected["state_dim"] = math.prod(spec.observation["state"][0])
    expected |= {name: getattr(env_config, name, None) for name in ("control_mode", "object_state")}
    sizes: dict = {camera: spec.observation[f"image/{camera}"][0][-2:] for camera in cameras}
    return Demonstrations(source, cameras, sizes, keys=imitate.keys, spec=spec, cache=cache, **expected)


def split_demonstrations(
    demonstrations: list[Demonstrations], imitate: ImitateConfig
) -> tuple[list[Demonstrations], list[Demonstrations]]:
    """For training, and held out."""
    parts = [demos.split(imitate.held_out) for demos in demonstrations]
    return [training for training, _ in parts], [held_out for _, held_out in parts]


def _spec_of(demonstrations: list[Demonstrations], config: DatasetConfig) -> EnvSpec:
    """The observations and actions of datasets: the first one's, with bounds and instructions of all of them."""
    first = demonstrations[0]
    size = (config.image_size, config.image_size) if isinstance(config.image_size, int) else config.image_size
    observation: dict = {
        f"image/{camera}": ((3, *(size or shape)), "uint8") for camera, shape in first.recorded_shapes.items()
    }
    for name in (STATE, PRIVILEGED, POINTS):
        if first.has(f"observation.{name}"):
            observation[name] = first.numbers(f"observation.{name}").shape[1:], "float32"
    if first.mapping.keys("instruction"):
        longest = max(len(text.encode()) for demos in demonstrations for text in demos.instructions)
        observation["instruction"] = ((_TEXT_BYTES * max(1, -(-longest // _TEXT_BYTES)),), "uint8")
    if not observation:
        advice = "set the role of a key by imitate.keys={KEY: state}; it has " + ", ".join(first.dataset.columns)
        raise DatasetError(f"'{first.path}' has no observations; {advice}")
    dims = first.action_dim
    # datasets with other actions are refused when they are opened
    actions = np.concatenate([demos.numbers("action") for demos in demonstrations if demos.action_dim == dims])
    is_bounded = bool((np.abs(actions) <= 1).all())
    low, high = (np.full(dims, -1.0), np.full(dims, 1.0)) if is_bounded else (actions.min(0), actions.max(0))
    for name, given in (("action_low", config.action_low), ("action_high", config.action_high)):
        if given and len(given) != dims:
            raise DatasetError(f"env.{name} has {len(given)} numbers; an action of '{first.path}' has {dims} entries")
    low, high = np.array(config.action_low or low), np.array(config.action_high or high)
    if (low > high).any():
        raise DatasetError(f"env.action_low={low.tolist()} exceeds env.action_high={high.tolist()}; give lower bounds")
    return EnvSpec(
        observation=observation,
        action_dim=dims,
        action_low=tuple(low.tolist()),
        action_high=tuple(high.tolist()),
        reports_success=False,
        control_hz=first.fps or 30.0,
        has_control_hz=first.fps is not None,
        state_entries=first.mapping.state_entries,
    )


def _check_padded_states(demonstrations: list[Demonstrations], env_config: Section) -> None:
    """Raise DatasetError if states have other contents; by padding, the states of every dataset have the same size."""
    if not getattr(env_config, "pad_state", 0):
        return
    bare = make_env(env_config.model_copy(update={"pad_state": 0}), 1)
    bare.close()
    entries, expected = math.prod(bare.spec.observation["state"][0]), getattr(env_config, "object_state", None)
    for demos in demonstrations:
        mistakes = []
        recorded = demos.dataset.extras.get("env", {}).get("object_state", expected)
        # `privileged` and `hidden` have the same state, and recorded `privileged` poses can complete it to `state`
        pair = (recorded, expected)
        fits = recorded == expected or "state" not in pair or pair == ("privileged", "state")
        if not fits:
            mistakes.append(f"env.object_state: expected {expected}, found {recorded}")
        if demos.state_dim > entries:
            mistakes.append(f"entries of observation.state: expected {entries} or fewer, found {demos.state_dim}")
        if mistakes:
            advice = "give the config it was recorded with, or record another dataset"
            raise DatasetError("\n".join([f"'{demos.path}' does not fit the settings; {advice}:", *mistakes]))
