"""Algorithms: rollouts -> updates of a policy."""

ALGORITHMS = {"ppo": "sparring.algorithms.ppo:PPO", "grpo": "sparring.algorithms.grpo:GRPO"}
