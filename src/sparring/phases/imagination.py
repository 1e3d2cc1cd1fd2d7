"""`rollout.imagined`: robots act in what a world model predicts, instead of in the env."""

from sparring.distributed import Distributed
from sparring.envs.env import Env
from sparring.phases.earlier import episodes_of, load_teacher
from sparring.world_models.imagined_env import ImaginedEnv, StoredStarts


def imagine(env: Env, config, distributed: Distributed) -> ImaginedEnv:
    """As many robots as in `env`, which is closed, in the imagination of the world model of `rollout.imagined`.

    Episodes begin somewhere in those that the world model learned from.
    """
    path, rollout = config.rollout.imagined, config.rollout
    model = load_teacher(path, "rollout.imagined", config, env).to(distributed.device).requires_grad_(False).eval()
    starts = StoredStarts(model, episodes_of(path, "rollout.imagined", env))
    imagined = ImaginedEnv(
        model,
        env.spec,
        starts,
        env.num_envs,
        rollout.imagined_decisions,
        device=env.device,
        first_env=env.first_env,
        total_envs=env.total_envs,
        group_size=env.group_size,
    )
    # what it imagines; evaluations are made in the true one
    imagined.config = env.config
    env.close()
    return imagined
