"""WorldModelLearner: gradient steps on a world model's loss. Whoever has windows and wants a better model."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import islice

import torch
from tensordict import TensorDict
from torch import nn

from sparring.algorithms.gradient_step import FlatParameters, scheduled, warmup
from sparring.processes.distributed import Distributed
from sparring.world_models.world_model import WorldModel

MAX_GRAD_NORM = 1.0
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.01
# gradient steps over which the learning rate rises
WARMUP_STEPS = 50


class WorldModelLearner:
    """`config.learning_rate`, of whichever phase it learns in, falls to 0 as `fraction` goes to 1."""

    def __init__(self, config, model: WorldModel, distributed: Distributed):
        self.config, self.model, self.distributed = config, model, distributed
        self.gradient_steps = 0
        self._learn_with(model.learning())

    def update(self, batches: Iterable[TensorDict], count: int, fraction: float) -> dict[str, float]:
        """Learn from the next `count` batches of windows `[B, T]`; `fraction` of the run is done. Means of metrics."""
        if self.gradient_steps == 0:
            self.distributed.unite(self.model)
        self.flat.check()
        self.model.train()
        values: dict[str, list[torch.Tensor]] = defaultdict(list)
        for batch in islice(batches, count):
            for name, value in self._gradient_step(batch, fraction).items():
                values[name].append(value)
        self.model.eval()
        # a part of the model that began to learn only now has numbers of the last steps only
        means = {name: float(torch.stack(of).mean()) for name, of in values.items()}
        return self.distributed.mean(means)

    def state_dict(self) -> dict:
        return {
            "optimizer": self.optimizer.state_dict(),
            "gradient_steps": self.gradient_steps,
            "began": self.began,
        }

    def load_state_dict(self, state: dict) -> None:
        """The model has its weights back already: they say what is learning."""
        self._learn_with(self.model.learning())
        self.optimizer.load_state_dict(state["optimizer"])
        self.gradient_steps, self.began = state["gradient_steps"], state["began"]

    def _learn_with(self, parameters: list[nn.Parameter]) -> None:
        """A fresh optimiser of these: the others neither move nor shrink."""
        self.flat = FlatParameters(parameters)
        self.optimizer = torch.optim.AdamW(
            [self.flat.vector], self.config.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )
        self.began = self.gradient_steps

    def _gradient_step(self, batch: TensorDict, fraction: float) -> dict[str, torch.Tensor]:
        rate = self.config.learning_rate * scheduled("linear", fraction) * self.model.learning_rate_scale()
        rate *= warmup(self.gradient_steps - self.began, WARMUP_STEPS)
        self.model.update_normalizers(batch, self.distributed.sum)
        loss, numbers = self.model(batch)
        gradient = self.flat.vector.grad
        gradient.zero_()
        loss.backward()
        self.distributed.average_(gradient)
        norm = nn.utils.clip_grad_norm_([self.flat.vector], MAX_GRAD_NORM)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.gradient_steps += 1
        # at once, so that what is saved now is what the next step takes
        learning = self.model.learning()
        if [*map(id, learning)] != [*map(id, self.flat.parameters)]:
            self._learn_with(learning)
        return numbers | {"loss": loss.detach(), "grad_norm": norm, "lr": torch.tensor(rate)}
