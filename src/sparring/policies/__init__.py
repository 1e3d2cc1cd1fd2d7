"""Policies: map observations to action chunks, and score earlier chunks."""

POLICIES = {
    "actor_critic": "sparring.policies.actor_critic:ActorCritic",
    "flow": "sparring.policies.flow.policy:FlowPolicy",
    "vla": "sparring.policies.vla.policy:make_vla_policy",
    "native_vla": "sparring.policies.native.policy:NativeVLA",
    "pi0": "sparring.policies.pi0:PI0Policy",
}
