"""WorldModelLearner: gradient steps on a world model's loss."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from tensordict import TensorDict

from sparring.algorithms.gradient_step import GradientStep, schedule
from sparring.processes.distributed import Distributed
from sparring.world_models.world_model import WorldModel

_MAX_GRAD_NORM = 1.0
_ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.01}
# gradient steps over which the learning rate rises
_WARMUP_STEPS = 50


class WorldModelLearner:
    """Trains a world model. `config.learning_rate` decays linearly to 0 as `fraction` goes to 1.

    `config`, `section`: the config section of the phase, and its name. `skips`: see GradientStep.
    """

    def __init__(self, config: Any, model: WorldModel, distributed: Distributed, section: str, skips: int = 0):
        self.config, self.model, self.distributed, self.section = config, model, distributed, section
        self.skips = skips
        self.gradient_steps = 0
        self._learn_with_fresh_optimizer()

    def update(self, batches: Iterable[TensorDict], count: int, fraction: float) -> dict[str, float]:
        """Learn from the next `count` batches of windows `[B, T]`; `fraction` of the run is done. Returns metrics."""
        if self.gradient_steps == 0:
            self.distributed.broadcast_weights(self.model)
        self.model.train()
        steps, left_out = [], 0
        for batch in islice(batches, count):
            steps.append(self._learn_from(batch, fraction))
            # immediately, so that a checkpoint saved now has the optimiser of the next step
            if [*map(id, self.model.learning())] != [*map(id, self.step.parameters)]:
                left_out += self.step.end_update()
                self._learn_with_fresh_optimizer()
        left_out += self.step.end_update()
        self.model.eval()
        values: dict[str, list[torch.Tensor]] = defaultdict(list)
        for numbers in steps:
            if not left_out or numbers["grad_norm"].isfinite():
                for name, value in numbers.items():
                    values[name].append(value)
        # a part of the model that starts to learn during the update has metrics of the later steps only
        means = {name: float(torch.stack(of).mean()) for name, of in values.items()}
        skipped = {"steps_skipped": float(left_out)} if self.skips else {}
        return self.distributed.mean(means) | skipped

    def state_dict(self) -> dict:
        return {"optimizer": self.step.state_dict(), "gradient_steps": self.gradient_steps, "began": self.began}

    def load_state_dict(self, state: dict) -> None:
        """Call after the model's weights are loaded: they determine which parameters learn."""
        self._learn_with_fresh_optimizer()
        self.step.load_state_dict(state["optimizer"])
        self.gradient_steps, self.began = state["gradient_steps"], state["began"]

    def _learn_with_fresh_optimizer(self) -> None:
        """A new optimiser of the parameters that learn now; weight decay leaves the others unchanged."""
        groups = [{"params": self.model.learning(), "lr": self.config.learning_rate}]
        rate = f"{self.section}.learning_rate={self.config.learning_rate:g}"
        self.step = GradientStep(groups, self.distributed, _MAX_GRAD_NORM, rate, torch.optim.AdamW, **_ADAMW)
        self.step.skips = self.skips
        self.began = self.gradient_steps

    def _learn_from(self, batch: TensorDict, fraction: float) -> dict[str, torch.Tensor]:
        lr = self.config.learning_rate * schedule("linear", fraction) * self.model.learning_rate_scale()
        lr *= min(1.0, (self.gradient_steps - self.began + 1) / _WARMUP_STEPS)
        self.step.set_lr(lr)
        self.model.update_normalizers(batch, self.distributed.sum)
        # the forward pass adds keys to its batch
        given = batch.copy()
        loss, numbers = self.model(batch)
        norm = self.step(given, loss)
        self.gradient_steps += 1
        return numbers | {"loss": loss.detach(), "grad_norm": norm, "lr": torch.tensor(lr)}
