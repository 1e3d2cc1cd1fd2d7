"""policy.name=vla: which policy a model gets follows from what it has."""

from sparring.policies.policy import Policy
from sparring.policies.vla.flow import VLAFlowPolicy
from sparring.policies.vla.interface import denoises
from sparring.policies.vla.policy import VLAPolicy
from sparring.policies.vla.wrap import model_class
from sparring.policies.vla_configs import VLAConfig


def make_vla_policy(config: VLAConfig, spec, chunk: int) -> Policy:
    kind = VLAFlowPolicy if denoises(model_class(config)) else VLAPolicy
    return kind(config, spec, chunk)
