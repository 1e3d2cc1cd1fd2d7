"""Drawing actions from a model so that the same noise gives the same action.

A model with `sample(observations, noise)` draws with the numbers it is given. One that draws inside `forward` uses
torch's own generator, which is seeded from the noise here, and put back as it was. By `rows`, each decision is drawn
by itself: what a robot does then depends neither on the others nor on how they are batched. By `batch`, all are drawn
at once: faster, and the same again only for the same batch.
"""

import torch
from tensordict import TensorDict
from torch import nn

from sparring.errors import UserError
from sparring.policies.vla.interface import takes

# uniform numbers that make a seed
_SEED_NUMBERS = 2
_BITS = 24
# of a model whose mode is asked for and that may draw even so
_STILL = 0
# tries after which a model that always answers the same is believed to draw nothing
_TRIES = 8


class Drawing:
    """How one model is asked for actions."""

    def __init__(self, model: nn.Module, size: int, by_rows: bool, discrete: bool):
        self.samples = hasattr(model, "sample")
        self.told_mode = takes(model.forward, "deterministic")
        self.by_rows = by_rows
        self.noise_size = int(getattr(model, "noise_size", size)) if self.samples else _SEED_NUMBERS
        # choices are few: the same one several times means nothing
        self.is_tried = self.samples or discrete

    def mode(self, model: nn.Module, seen: TensorDict) -> torch.Tensor:
        if self.told_mode:
            return model(seen, deterministic=True)
        return model(seen) if self.samples else _seeded(model, _STILL, lambda: model(seen))

    def draw(self, model: nn.Module, seen: TensorDict, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Actions, and their log-probs where the model tells them."""
        if self.samples:
            drawn = model.sample(seen, noise)
            return drawn if isinstance(drawn, tuple) else (drawn, None)
        seeds = _seeds(noise)
        if not self.is_tried:
            self.is_tried = True
            self._try(model, seen[:1])
        if not self.by_rows:
            return _seeded(model, _folded(seeds), lambda: self._forward(model, seen)), None
        one = [seen[row : row + 1] for row in range(len(seen))]
        rows = [_seeded(model, s, lambda o=o: self._forward(model, o)) for s, o in zip(seeds, one, strict=True)]
        return torch.cat(rows), None

    def _forward(self, model: nn.Module, seen: TensorDict) -> torch.Tensor:
        return model(seen, deterministic=False) if self.told_mode else model(seen)

    def _try(self, model: nn.Module, seen: TensorDict) -> None:
        first, *others = (_seeded(model, seed, lambda: self._forward(model, seen)) for seed in range(_TRIES))
        if all(torch.equal(first, other) for other in others):
            raise UserError(
                f"{type(model).__name__}.forward gives the same action whatever torch's seed is, so nothing would be "
                "explored; let it draw (from the distribution that evaluate_actions scores), or add "
                "sample(observations, noise)"
            )


def _seeded(model: nn.Module, seed: int, call) -> torch.Tensor:
    # torch keeps a generator for each device
    with torch.random.fork_rng(devices={p.device for p in model.parameters() if p.device.type == "cuda"}):
        torch.manual_seed(seed)
        return call()


def _seeds(noise: torch.Tensor) -> list[int]:
    # [B, 2] in (0, 1) -> 48 bits each
    words = (noise[:, :_SEED_NUMBERS].double() * 2**_BITS).long().tolist()
    return [(first << _BITS) | second for first, second in words]


def _folded(seeds: list[int]) -> int:
    folded = 0
    for seed in seeds:
        folded = (folded * 1_000_003 ^ seed) & (2**63 - 1)
    return folded
