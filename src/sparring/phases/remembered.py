"""What a policy would have remembered of demonstrations, had it been the one to act."""

import torch
from tensordict import TensorDict

from sparring.contract import POLICY_MEMORY
from sparring.data.chunks import ActionChunks
from sparring.policies.policy import Policy

# steps that are looked at together
_AT_ONCE = 1024


@torch.no_grad()
def remembered(policy: Policy, chunks: ActionChunks, device: torch.device) -> torch.Tensor:
    """`memory/policy` [F, M] as it enters a decision at each of the F demonstrated steps.

    A policy decides every C steps: before step t it did at t - C, t - 2 C and so on, and first of all at step 0.
    """
    memory = torch.zeros(len(chunks), policy.memory_size, device=device)
    after = torch.zeros_like(memory)
    first, lengths = chunks.first_steps, chunks.episode_lengths
    for t in range(int(lengths.max())):
        # of the episodes that last so long
        steps = first[lengths > t] + t
        if t:
            memory[steps] = after[steps - min(t, policy.chunk)]
        for part in steps.split(_AT_ONCE):
            acted = chunks.actions(part)[:, : policy.chunk]
            td = TensorDict({"observation": chunks.observation(part), "action": acted}, [len(part)])
            after[part] = policy.remember(td.to(device).set(POLICY_MEMORY, memory[part]))
    return memory
