"""From the `policy` section of a config to a Policy."""

from sparring.config import Section
from sparring.policies import POLICIES
from sparring.policies.policy import Policy
from sparring.resolve import resolve


def make_policy(config: Section, spec, chunk: int) -> Policy:
    """A fresh policy for an env with this spec, acting in chunks of `chunk` steps."""
    return resolve(config.name, POLICIES, "policy")(config, spec, chunk)
