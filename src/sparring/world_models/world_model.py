"""WorldModel: predicts what one decision leads to, and carries a memory of what it has seen.

Letters: N robots, B windows of T decisions, C steps of a decision, A action dims, S state dims, D numbers of memory.
"""

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from sparring.config.resolve import build
from sparring.config.section import Section
from sparring.contract import EnvSpec
from sparring.world_models import WORLD_MODELS


class WorldModel(nn.Module):
    """A class of your own takes (config, spec, chunk) and overrides all of it.

    Everywhere `memory/world_model [.., D]` is the memory as it *entered* a decision (absent: empty), and `is_first`
    (where present) clears it. The action taken is always an input.
    """

    # all cameras it predicts, in order
    cameras: tuple[str, ...]
    # those of them that it has learned to do without at times, as an explorer does
    dispensable: tuple[str, ...] = ()
    # D; the empty memory is all zeros
    memory_size: int
    # of the ensemble whose disagreement `score` measures
    members: int

    @property
    def ready(self) -> bool:
        """False while it does not predict yet because it learns something else first."""
        return True

    def settle(self) -> None:
        """Half of a run is over: what comes first must be done with now, so that there is time for the rest."""

    def loss(self, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """How badly it predicts windows `[B, T]`, and numbers to log.

        The first column of `memory/world_model`, where present, is the memory that entered the windows. Only steps in
        `mask` are learned from. Writes `memory_after [B, T, D]`, detached, into the batch: the memory after each step,
        whose last column enters the windows that follow.
        """
        raise NotImplementedError

    def observe(self, td: TensorDict, without: tuple[str, ...] = ()) -> Tensor:
        """The memory `[N, D]` after the decisions `td [N]`: observation and action folded in, these cameras unseen."""
        raise NotImplementedError

    def predict(self, td: TensorDict, without: tuple[str, ...] = ()) -> TensorDict:
        """A *new* TensorDict [N] of what the decisions `td [N]` lead to, by the ensemble's mean.

        image/<camera> uint8 [3, H, W], state [S], reward (summed over the chunk), terminated and success
        (probabilities), and memory [D] afterwards.
        """
        raise NotImplementedError

    def score(self, td: TensorDict, without: tuple[str, ...] = ()) -> TensorDict:
        """What the transitions `td [N]` (with next/observation) were to it: a *new* TensorDict [N] of float32.

        error: cross-entropy of the true next tokens under the ensemble's mean; entropy of that mean; disagreement:
        that entropy less the mean of the members' own (all in nats per token); surprise: latent_surprise; accuracy:
        share of tokens predicted right; and memory [D] afterwards.
        """
        raise NotImplementedError

    def correct_tokens(self, td: TensorDict) -> TensorDict:
        """Which of the P tokens of the true next frames of `td [N]` are predicted right, bool [N, P] each.

        right: by the ensemble's mean; copied: by a copy of the last frame, as if nothing changed.
        """
        raise NotImplementedError

    def reconstruct(self, td: TensorDict) -> TensorDict:
        """image/<camera> uint8 of the true next frames `[N]`, seen through the tokenizer: the best it could predict."""
        raise NotImplementedError

    def learning(self) -> list[nn.Parameter]:
        """The parameters that the next call of `loss` gives gradients to; the others stay as they are."""
        return list(self.parameters())

    def learning_rate_scale(self) -> float:
        """What is left of their learning rate; a part that stops to learn before the others comes to rest by it."""
        return 1.0

    def update_normalizers(self, batch: TensorDict, sum_over_processes) -> None:
        """Fold windows into running statistics of state and reward. Called before learning from them."""

    def empty_memory(self, rows: int) -> Tensor:
        """[rows, D], of robots that have seen nothing."""
        return torch.zeros(rows, self.memory_size, device=next(self.parameters()).device)

    def forward(self, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(batch)


def make_world_model(config: Section, spec: EnvSpec, chunk: int) -> WorldModel:
    """A fresh world model of an env with this spec, acted on in chunks of `chunk` steps."""
    return build(config, WORLD_MODELS, spec, chunk, kind="world model")


class MemoryStateManager:
    """The memory of each robot (or stream of windows): `enter(td)` before a decision or window, `leave(memory)` after.

    Rows whose episode begins start from zeros; gradients never pass from one decision or window to the next. `key` is
    where the memory enters, e.g. with the head camera masked: ("memory", "world_model_wrist").
    """

    def __init__(self, rows: int, size: int, key: tuple[str, ...] = ("memory", "world_model"), device="cpu"):
        self.key = key
        self.memory = torch.zeros(rows, size, device=device)

    def enter(self, td: TensorDict) -> TensorDict:
        """Writes the memory into decisions `[N]` or the first column of windows `[N, T]`, zeros where `is_first`."""
        windows = td.batch_dims == 2
        is_first = td["is_first"][:, 0] if windows else td["is_first"]
        memory = torch.where(is_first[:, None], 0.0, self.memory)
        if windows:
            entered = memory.new_zeros(*td.batch_size, memory.shape[-1])
            entered[:, 0] = memory
            memory = entered
        return td.set(self.key, memory)

    def leave(self, memory: torch.Tensor) -> None:
        """Keeps `[N, D]` for the next `enter`; of windows `[N, T, D]` (`memory_after`) the last column."""
        self.memory = memory.detach()[:, -1] if memory.dim() == 3 else memory.detach()

    def state_dict(self) -> dict:
        return {"memory": self.memory.cpu()}

    def load_state_dict(self, state: dict) -> None:
        self.memory = state["memory"].to(self.memory.device)
