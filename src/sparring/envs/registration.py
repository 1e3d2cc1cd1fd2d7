"""Makes the built-in tasks known to gymnasium as `sparring/<task>`."""


def register() -> None:
    """Register every tabletop task; doing so again changes nothing."""
    import gymnasium

    from sparring.envs.tabletop.tasks import TASKS

    for task in TASKS:
        env_id = f"sparring/{task}"
        if env_id not in gymnasium.registry:
            # no max_episode_steps: the env truncates its own episodes, a TimeLimit around it would be a second clock
            gymnasium.register(
                env_id,
                "sparring.envs.tabletop.gym:TabletopGym",
                vector_entry_point="sparring.envs.tabletop.gym_vector:TabletopVectorGym",
                kwargs={"id_task": task},
            )
