"""Policies: observations -> action chunks, and the score of chunks taken before."""

POLICIES = {
    "actor_critic": "sparring.policies.actor_critic:ActorCritic",
    "flow": "sparring.policies.flow:FlowPolicy",
    "vla": "sparring.policies.vla.make:make_vla_policy",
}
CONFIGS = {
    "actor_critic": "sparring.policies.configs:ActorCriticConfig",
    "flow": "sparring.policies.configs:FlowConfig",
    "vla": "sparring.policies.vla_configs:VLAConfig",
}
