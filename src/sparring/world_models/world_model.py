"""WorldModel: predicts what a decision leads to, and carries a memory. Letters: N robots, B windows of T decisions, C
steps of a decision, A action dims, S state dims, D numbers of memory."""

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from sparring.config.resolve import build
from sparring.config.section import Section
from sparring.contract import EnvSpec
from sparring.world_models import WORLD_MODELS


class WorldModel(nn.Module):
    """A class of your own takes (config, spec, chunk) and overrides all of it. `memory/world_model [.., D]` is the
    memory as it *entered* a decision (absent: empty); `is_first`, where present, clears it."""

    cameras: tuple[str, ...]  # all cameras it predicts, in order
    dispensable: tuple[str, ...] = ()  # those of them that it has learned to do without at times, as an explorer does
    memory_size: int  # D; the empty memory is all zeros
    members: int  # of the ensemble whose disagreement `score` measures

    @property
    def ready(self) -> bool:
        """False while it does not predict yet because it learns something else first."""
        return True

    @property
    def preparing(self) -> str | None:
        """What it learns before it predicts, for people to read; None: it predicts."""
        return None if self.ready else "does not predict yet"

    def settle(self) -> None:
        """Half of a run is over: what is learned first must end now."""

    def loss(self, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of windows `[B, T]`, and numbers to log. The first column of `memory/world_model`, where present,
        entered the windows. Only steps in `mask` count. Writes `memory_after [B, T, D]` each step, detached."""
        raise NotImplementedError

    def observe(self, td: TensorDict, without: tuple[str, ...] = ()) -> Tensor:
        """The memory `[N, D]` after the decisions `td [N]`: observation and action folded in, these cameras unseen."""
        raise NotImplementedError

    def predict(self, td: TensorDict, without: tuple[str, ...] = ()) -> TensorDict:
        """A *new* TensorDict [N] of what the decisions `td [N]` lead to, by the ensemble's mean: image/<camera> uint8
        [3, H, W], state [S], reward (of the chunk), terminated and success (probabilities), memory after [D]."""
        raise NotImplementedError

    def score(self, td: TensorDict, without: tuple[str, ...] = ()) -> TensorDict:
        """A *new* TensorDict [N] of the transitions `td [N]` (with next/observation), in nats per token: error
        (cross-entropy of the true next tokens under the ensemble's mean), entropy (of that mean), disagreement (entropy
        less the mean of the members' own), surprise (latent_surprise), accuracy (right tokens), memory after [D]."""
        raise NotImplementedError

    def correct_tokens(self, td: TensorDict) -> TensorDict:
        """Which of the P next tokens of `td [N]` are right, bool [N, P]: `right` by the mean, `copied` by a copy."""
        raise NotImplementedError

    def reconstruct(self, td: TensorDict) -> TensorDict:
        """image/<camera> uint8 of the true next frames `[N]`, seen through the tokenizer: the best it could predict."""
        raise NotImplementedError

    def learning(self) -> list[nn.Parameter]:
        """The parameters that the next call of `loss` gives gradients to; the others stay as they are."""
        return list(self.parameters())

    def learning_rate_scale(self) -> float:
        """A factor of the learning rate, to anneal a part that stops to learn before the others."""
        return 1.0

    def update_normalizers(self, batch: TensorDict, sum_over_processes) -> None:
        """Fold windows into running statistics of state and reward. Called before learning from them."""

    def empty_memory(self, rows: int) -> Tensor:
        return torch.zeros(rows, self.memory_size, device=next(self.parameters()).device)

    def forward(self, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(batch)


def make_world_model(config: Section, spec: EnvSpec, chunk: int) -> WorldModel:
    return build(config, WORLD_MODELS, spec, chunk, kind="world model")


class MemoryStateManager:
    """The memory of each robot or stream of windows: `enter(td)` before a decision or window, `leave(memory)` after.
    Zeros where an episode begins; gradients stop between windows. The memory enters at `key`."""

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
