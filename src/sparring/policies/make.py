"""From the `policy` section of a config to a Policy."""

import torch

from sparring.config import Section
from sparring.out_of_memory import memory_told
from sparring.policies import POLICIES
from sparring.policies.policy import Policy
from sparring.resolve import resolve


def make_policy(config: Section, spec, chunk: int, device: str | torch.device = "cpu") -> Policy:
    """A fresh policy for an env with this spec, acting in chunks of `chunk` steps."""
    with memory_told(f"making the policy ({config.name})"):
        policy = resolve(config.name, POLICIES, "policy")(config, spec, chunk)
    with memory_told(f"moving the policy to {device}", policy):
        return policy.to(device)
