"""Opens the demonstrations of `imitate.demos`, for an env or without any (env.name=dataset)."""

import math
from zlib import crc32

import numpy as np
import torch

from sparring.config.schema import Config
from sparring.config.section import Section
from sparring.contract import EnvSpec
from sparring.data.dataset import Dataset, DatasetError, read_dataset
from sparring.data.demonstrations import Demonstrations
from sparring.data.mapping import POINTS, PRIVILEGED, STATE
from sparring.envs.configs import DatasetConfig
from sparring.envs.env import Env, make_env
from sparring.envs.recorded import Recorded
from sparring.phases.configs import ImitateConfig
from sparring.policies.policy import Policy

_TEXT_BYTES = 256  # of an instruction; longer ones take multiples of it


def read_datasets(imitate: ImitateConfig) -> list[Dataset]:
    return [read_dataset(folder) for folder in imitate.demos]


def make_imitation_env(config: Config, datasets: list[Dataset], device: str | torch.device = "cpu") -> Env:
    """An env with the observations and actions to imitate; with env.name=dataset it has no simulator."""
    if not isinstance(config.env, DatasetConfig):
        return make_env(config.env, 1, config.rollout.max_episode_steps, device)
    bare = [Demonstrations(dataset, keys=_keys_of(dataset, datasets, config.imitate)) for dataset in datasets]
    env = Env(Recorded(config.env, spec=_spec_of(bare, config.env, config.imitate)), device)
    env.config = config.env
    return env


def open_demonstrations(
    config: Config, datasets: list[Dataset], spec: EnvSpec, policy: Policy | None = None
) -> list[Demonstrations]:
    """The demonstrations for an env; images of the cameras that `policy` reads are decoded (None: no images are)."""
    if policy is None:
        cameras = [name.removeprefix("image/") for name in spec.observation if name.startswith("image/")]
    else:
        cameras = cameras_of(policy)
    if config.imitate.fps == "resample" and not spec.has_control_hz:
        raise DatasetError(f"imitate.fps=resample: env.name={config.env.name} states no rate; set imitate.fps=ignore")
    found = []
    for dataset in datasets:
        imitate = config.imitate.model_copy(update={"keys": _keys_of(dataset, datasets, config.imitate)})
        found.append(_open(dataset, config.env, spec, imitate, cameras, cache=policy is not None))
    _check_padded_states(found, config.env)
    return found


def cameras_of(policy: Policy) -> list[str]:
    """The cameras that the policy reads: images of others are not decoded."""
    return list(dict.fromkeys(key[2] for key in policy.in_keys if key[:2] == ("observation", "image")))


def _keys_of(dataset: Dataset, datasets: list[Dataset], imitate: ImitateConfig) -> dict[str, str]:
    """imitate.keys without the keys of other datasets; a key that no dataset has is refused by the KeyMap."""
    elsewhere = {key for other in datasets for key in other.keys} - set(dataset.keys)
    return {key: role for key, role in imitate.keys.items() if key not in elsewhere}


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
    demonstrations: list[Demonstrations], config: Config
) -> tuple[list[Demonstrations], list[Demonstrations]]:
    """For training, and held out; an env evaluates without demonstrations, so none are held out for it."""
    if not isinstance(config.env, DatasetConfig):
        return demonstrations, []
    parts = [demos.split(config.imitate.held_out) for demos in demonstrations]
    return [training for training, _ in parts], [held_out for _, held_out in parts]


def split_stamp(held_out: list[Demonstrations]) -> list[str]:
    """By which a dataset and its split are recognised: its size, and checksums of the lengths of all episodes and of
    the numbers of the held-out ones."""
    return [
        f"{len(demos.dataset.lengths)} episodes of {demos.dataset.steps} steps "
        f"({crc32(demos.dataset.lengths.tobytes()):08x}), {len(demos)} held out "
        f"({crc32(demos.numbers_of_episodes.astype(np.int64).tobytes()):08x})"
        for demos in held_out
    ]


def refuse_other_split(trained: list[str], held_out: list[Demonstrations]) -> None:
    """`trained`: the stamp of the run's own split."""
    for demos, before, now in zip(held_out, trained, split_stamp(held_out), strict=True):
        if before != now:
            changed = f"has changed since the run was trained: it had {before}, and has {now}"
            advice = "so trained and held-out episodes would be mixed; restore it, or train a new run"
            raise DatasetError(f"'{demos.path}' {changed}; {advice}")


def _spec_of(demonstrations: list[Demonstrations], config: DatasetConfig, imitate: ImitateConfig) -> EnvSpec:
    """The observations and actions of datasets: the first one's, with bounds and instructions of all of them."""
    first = demonstrations[0]
    size = (config.image_size, config.image_size) if isinstance(config.image_size, int) else config.image_size
    observation: dict = {
        f"image/{camera}": ((3, *(size or shape)), "uint8") for camera, shape in first.recorded_shapes.items()
    }
    for name in (STATE, PRIVILEGED, POINTS):
        if first.has(f"observation.{name}"):
            observation[name] = first.shape(f"observation.{name}")[1:], "float32"
    if first.mapping.keys("instruction"):
        longest = max(len(text.encode()) for demos in demonstrations for text in demos.instructions)
        observation["instruction"] = ((_TEXT_BYTES * max(1, -(-longest // _TEXT_BYTES)),), "uint8")
    if not observation:
        advice = "set the role of a key by imitate.keys={KEY: state}; it has " + ", ".join(first.dataset.columns)
        raise DatasetError(f"'{first.path}' has no observations; {advice}")
    low, high = _action_bounds(demonstrations, config, imitate)
    return EnvSpec(
        observation=observation,
        action_dim=first.action_dim,
        action_low=tuple(low.tolist()),
        action_high=tuple(high.tolist()),
        reports_success=False,
        control_hz=first.fps or 30.0,
        has_control_hz=first.fps is not None,
        state_entries=first.mapping.state_entries,
    )


def _action_bounds(
    demonstrations: list[Demonstrations], config: DatasetConfig, imitate: ImitateConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest number of each entry: as given, else inferred from the training episodes."""
    first, dims = demonstrations[0], demonstrations[0].action_dim
    for name, given in (("action_low", config.action_low), ("action_high", config.action_high)):
        if given and len(given) != dims:
            raise DatasetError(f"env.{name} has {len(given)} numbers; an action of '{first.path}' has {dims} entries")
    low, high = np.full(dims, -1.0), np.full(dims, 1.0)
    if own := [demos.path for demos in demonstrations if demos.dataset.is_own]:
        if config.action_low or config.action_high:
            raise DatasetError(f"env.action_low, env.action_high: actions of '{own[0]}' are in [-1, 1]; leave them out")
        return low, high
    # datasets with other actions are refused when they are opened
    training = [demos.split(imitate.held_out)[0] for demos in demonstrations if demos.action_dim == dims]
    used = [demos.starts[: (imitate.episodes or len(demos)) + 1][-1] for demos in training]
    actions = np.concatenate([demos.numbers("action")[:end] for demos, end in zip(training, used, strict=True)])
    # a thousandth of the range, for rounding
    is_beyond = np.abs(actions).max(0) > 1.001
    low = np.array(config.action_low or np.where(is_beyond, actions.min(0), low))
    high = np.array(config.action_high or np.where(is_beyond, actions.max(0), high))
    if (low > high).any():
        raise DatasetError(f"env.action_low={low.tolist()} exceeds env.action_high={high.tolist()}; give lower bounds")
    return low, high


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
