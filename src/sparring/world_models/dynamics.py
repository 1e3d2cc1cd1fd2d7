"""Dynamics: patch features, the decision and the memory -> the digits of all next tokens at once.

A trunk that is shared mixes what is seen with what is remembered and updates the memory; separate members read the
result and predict. Only the trunk runs step by step through time.
Letters: N rows, P patches of all cameras, R registers, W width, m numbers of memory of each patch and register.
"""

import torch
from torch import nn

from sparring.world_models.layers import Attention

# tokens of the trunk that belong to no patch, for what the memory keeps of the scene as a whole
REGISTERS = 4


class Trunk(nn.Module):
    """One transformer block over everything, and a GRU at each patch and register: the memory `[N, (P + R) * m]`.

    The memory of a patch is what that part of a camera's view showed before (behind the arm, say); what one camera saw
    comes to the others through attention. It is the only history of frames there is.
    """

    def __init__(self, patches: int, width: int, heads: int, memory_channels: int):
        super().__init__()
        self.slots, self.memory_channels = patches + REGISTERS, memory_channels
        self.registers = nn.Parameter(torch.randn(REGISTERS, width) * 0.3)
        self.remembered = nn.Linear(memory_channels, width)
        # or a VLA's transformer instead (vla_trunk.py)
        self.block: nn.Module = Attention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.gru = nn.GRUCell(width, memory_channels)
        with torch.no_grad():
            # PyTorch's second gate keeps: start by keeping most, so that something lasts long enough to be of use
            self.gru.bias_hh[memory_channels : 2 * memory_channels] += 2.0

    @property
    def memory_size(self) -> int:
        return self.slots * self.memory_channels

    def forward(
        self, patches: torch.Tensor, decision: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, P, W], [N, 1 + P, W], [N, D] -> tokens [N, 1 + P + R, W], the decision's first, and the memory after."""
        memory = memory.view(len(memory) * self.slots, self.memory_channels)
        seen = torch.cat([patches, self.registers.expand(len(patches), -1, -1)], 1)
        # the decision is told to each patch at once, and not left for attention to find
        decision, of_patches = decision[:, :1], decision[:, 1:]
        told = torch.cat([of_patches, decision.expand(-1, REGISTERS, -1)], 1)
        known = seen + self.remembered(memory).view_as(seen) + told
        tokens = self.block(torch.cat([decision, known], 1))
        news = self.norm(tokens[:, 1:]).flatten(0, 1)
        return tokens, self.gru(news, memory).view(len(tokens), -1).float()


class Member(nn.Module):
    """One opinion of what comes next: a transformer of its own with heads for tokens and for the rest."""

    def __init__(self, patches: int, width: int, layers: int, heads: int, outputs: int, others: int):
        super().__init__()
        self.patches = patches
        self.blocks = nn.Sequential(*(Attention(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.tokens = nn.Linear(width, outputs)
        self.others = nn.Linear(width, others)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """-> [N, P, outputs] of the patches, [N, others] of the decision."""
        tokens = self.norm(self.blocks(tokens))
        return self.tokens(tokens[:, 1 : 1 + self.patches]), self.others(tokens[:, 0])
