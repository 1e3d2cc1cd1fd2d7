"""From the `env` section of a config to an Env."""

import logging

from sparring.config import Section
from sparring.cores import share_of_cores
from sparring.envs import ENVS
from sparring.envs.configs import GymConfig
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.resolve import import_path, resolve

log = logging.getLogger("sparring.env")

GYM_BACKENDS = {
    "serial": "sparring.envs.serial:SerialBackend",
    "process": "sparring.envs.process:ProcessBackend",
}


def make_env(
    config: Section,
    num_envs: int,
    max_episode_steps: int | None = None,
    device="cpu",
    first_env: int = 0,
    total_envs: int = 0,
    group_size: int = 1,
) -> Env:
    """`num_envs` robots of this process; they are numbers `first_env`.. of `total_envs` over all processes.

    `group_size` of them at a time start each training episode alike.
    """
    if not isinstance(config, Section):
        raise UserError(f"make_env takes the env section of a config, e.g. load_config().env; got {config!r}")
    if num_envs < 1:
        raise UserError(f"make_env: num_envs is {num_envs}, expected >= 1")
    if num_envs % group_size:
        raise UserError(f"make_env: {num_envs} robots cannot be put into groups of {group_size}")
    if isinstance(config, GymConfig):
        backend_class = import_path(GYM_BACKENDS[config.vectorize], "env backend")
    else:
        backend_class = resolve(config.name, ENVS, "env")
    env = Env(backend_class(config, num_envs, max_episode_steps), device, first_env, total_envs, group_size)
    env.config = config
    last = env.first_env + num_envs - 1
    log.debug("made robots %d to %d of %d: %s", env.first_env, last, env.total_envs, config.name)
    return env


def make_training_env(config, distributed, group: int = 0) -> Env:
    """This process's share of the robots that a run's config asks for, or one of its `rollout.groups`."""
    rollout = config.rollout
    robots = rollout.n_envs // rollout.groups
    env = config.env
    if rollout.groups > 1:
        # they simulate at the same time: all cores for each would be too many
        own = share_of_cores(rollout.groups)
        shared = "workers" if isinstance(env, GymConfig) else "threads"
        env = env.model_copy(update={shared: own}) if getattr(env, shared, None) == 0 else env
    return make_env(
        env,
        robots,
        rollout.max_episode_steps,
        distributed.device,
        first_env=distributed.rank * rollout.n_envs + group * robots,
        total_envs=distributed.world_size * rollout.n_envs,
        group_size=rollout.group_size,
    )
