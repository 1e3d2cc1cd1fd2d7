"""What is worked out of a whole rollout once it is there: log-probs, values, `next/value`."""

import torch
from tensordict import TensorDict

from sparring.contract import POLICY_MEMORY, check_completed
from sparring.data.buffer import Buffer
from sparring.policies.policy import Policy


@torch.no_grad()
def complete_rollout(policy: Policy, buffer: Buffer, root: TensorDict, version: int, check: bool) -> torch.Tensor:
    """By the weights that acted, whose `version` every row carries. `root`: where the next rollout starts.

    Returns the values `[T, N]`.
    """
    buffer.close(root)
    rollout = buffer.rollout()
    # [T, N] -> [T*N] -> [T, N]
    completed = policy.complete(rollout.flatten(0, 1)).unflatten(0, rollout.batch_size)
    for key, column in completed.items(True, True):
        buffer.set(key, column)
    rollout = buffer.rollout()
    if check:
        check_completed(rollout, policy.step_weights, "policy.complete")
    buffer.set("version", torch.full_like(rollout["next", "executed"], version))
    buffer.set(("next", "value"), _next_values(policy, buffer, rollout, root))
    return rollout["value"]


def _next_values(policy: Policy, buffer: Buffer, rollout: TensorDict, root: TensorDict) -> torch.Tensor:
    """V of the true next observation: the following row's, except where the episode or the rollout ended."""
    following = torch.empty_like(rollout["value"])
    following[:-1] = rollout["value"][1:]
    last, remembers = buffer.last, policy.memory_size
    following[-1] = policy.value(last.set(POLICY_MEMORY, root[POLICY_MEMORY]) if remembers else last)
    ends = buffer.finals()
    if ends is not None:
        (step, env), final = ends
        true_last = TensorDict({"observation": final}, final.batch_size)
        if remembers:
            # the root is of the next episode by then
            before = rollout.select(*policy.in_keys, "action")[step, env]
            true_last.set(POLICY_MEMORY, policy.remember(before))
        following[step, env] = policy.value(true_last)
    return following
