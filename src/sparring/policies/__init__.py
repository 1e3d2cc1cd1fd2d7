"""Policies: observations -> action chunks, and the score of chunks taken before."""

POLICIES = {
    "actor_critic": "sparring.policies.actor_critic:ActorCritic",
    "flow": "sparring.policies.flow:FlowPolicy",
    "pi0": "sparring.policies.pi0.policy:PI0Policy",
}
CONFIGS = {
    "actor_critic": "sparring.policies.configs:ActorCriticConfig",
    "flow": "sparring.policies.configs:FlowConfig",
    "pi0": "sparring.policies.pi0_configs:PI0PolicyConfig",
}
