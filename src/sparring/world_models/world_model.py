"""WorldModel: predicts the result of a decision, and carries a memory. Letters: N robots, B windows of T decisions, C
steps of a decision, A action dims, S state dims, D memory size."""

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from sparring.config.resolve import build
from sparring.config.section import Section
from sparring.contract import EnvSpec
from sparring.world_models import WORLD_MODELS


class WorldModel(nn.Module):
    """Interface. Your own class takes (config, spec, chunk) and overrides all of it. `memory/world_model [.., D]` is
    the memory *before* a decision (absent: empty); `is_first`, if present, clears it."""

    cameras: tuple[str, ...]  # all cameras it predicts, in order
    dispensable: tuple[str, ...] = ()  # cameras that are sometimes masked in training, because an explorer lacks them
    memory_size: int  # D; the empty memory is all zeros
    members: int  # of the ensemble whose disagreement `score` measures

    @property
    def ready(self) -> bool:
        """False while it trains a part, such as a tokenizer, that it needs before it can predict."""
        return True

    @property
    def preparing(self) -> str | None:
        """The state of the training that precedes prediction, for display; None: it predicts."""
        return None if self.ready else "does not predict yet"

    def settle(self) -> None:
        """Called after half of a run: ends the training that precedes prediction."""

    def loss(self, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of windows `[B, T]`, and metrics. The first column of `memory/world_model`, if present, is the
        memory before the windows. Only steps in `mask` count. Writes `memory_after [B, T, D]`, detached."""
        raise NotImplementedError

    def observe(self, td: TensorDict, without: tuple[str, ...] = ()) -> Tensor:
        """The memory `[N, D]` after the decisions `td [N]`, updated by observation and action; `without`: cameras to
        mask."""
        raise NotImplementedError

    def predict(self, td: TensorDict, without: tuple[str, ...] = ()) -> TensorDict:
        """A *new* TensorDict [N] with the predicted results of the decisions `td [N]`, by the ensemble's mean:
        image/<camera> uint8 [3, H, W], state [S], reward (of the chunk), terminated and success (probabilities), memory
        after [D]."""
        raise NotImplementedError

    def score(self, td: TensorDict, without: tuple[str, ...] = ()) -> TensorDict:
        """A *new* TensorDict [N] of the transitions `td [N]` (with next/observation), in nats per token: error
        (cross-entropy of the true next tokens under the ensemble's mean), entropy (of that mean), disagreement (entropy
        minus the mean entropy of the members), surprise (latent_surprise), accuracy (share of correct tokens), memory
        after [D]."""
        raise NotImplementedError

    def correct_tokens(self, td: TensorDict) -> TensorDict:
        """Correctness of the P next tokens of `td [N]`, bool [N, P]: `right` for the mean prediction, `copied` for a
        copy of the last frame."""
        raise NotImplementedError

    def reconstruct(self, td: TensorDict) -> TensorDict:
        """image/<camera> uint8: the true next frames `[N]` encoded and decoded, the upper bound of predictions."""
        raise NotImplementedError

    def learning(self) -> list[nn.Parameter]:
        """The parameters that the next call of `loss` has gradients for."""
        return list(self.parameters())

    def learning_rate_scale(self) -> float:
        """A factor of the learning rate, to anneal a part whose training ends before that of the others."""
        return 1.0

    def update_normalizers(self, batch: TensorDict, sum_over_processes) -> None:
        """Update the running statistics of state and reward. Called before learning from the windows."""

    def empty_memory(self, rows: int) -> Tensor:
        return torch.zeros(rows, self.memory_size, device=next(self.parameters()).device)

    def forward(self, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(batch)


def make_world_model(config: Section, spec: EnvSpec, chunk: int) -> WorldModel:
    return build(config, WORLD_MODELS, spec, chunk, kind="world model")


class MemoryStateManager:
    """The memory of each robot or stream of windows: `enter(td)` before a decision or window, `leave(memory)` after it.
    Zeros at the start of an episode; gradients stop between windows. `key`: the memory's key in a td."""

    def __init__(self, rows: int, size: int, key: tuple[str, ...] = ("memory", "world_model"), device="cpu"):
        self.key = key
        self.memory = torch.zeros(rows, size, device=device)

    def enter(self, td: TensorDict) -> TensorDict:
        """Write the memory into decisions `[N]` or the first column of windows `[N, T]`; zeros if `is_first`."""
        windows = td.batch_dims == 2
        is_first = td["is_first"][:, 0] if windows else td["is_first"]
        memory = torch.where(is_first[:, None], 0.0, self.memory)
        if windows:
            entered = memory.new_zeros(*td.batch_size, memory.shape[-1])
            entered[:, 0] = memory
            memory = entered
        return td.set(self.key, memory)

    def leave(self, memory: torch.Tensor) -> None:
        """Keep the memory `[N, D]`, or the last column of windows `[N, T, D]` (`memory_after`), for `enter`."""
        self.memory = memory.detach()[:, -1] if memory.dim() == 3 else memory.detach()

    def state_dict(self) -> dict:
        return {"memory": self.memory.cpu()}

    def load_state_dict(self, state: dict) -> None:
        self.memory = state["memory"].to(self.memory.device)
