"""Policies: observations -> action chunks, and the score of chunks taken before."""

POLICIES = {"actor_critic": "sparring.policies.actor_critic:ActorCritic"}
CONFIGS = {"actor_critic": "sparring.policies.configs:ActorCriticConfig"}
