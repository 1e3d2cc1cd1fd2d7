"""Algorithms: rollouts -> updates of a policy."""

ALGORITHMS = {"ppo": "sparring.algorithms.ppo:PPO"}
