"""VLAPolicy: a model of anybody's, with the documented interface, as a Policy.

Letters: B decisions, C steps of a chunk, A action entries of a step; the model's action_dim is C * A.
"""

from collections.abc import Mapping

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn

from sparring.errors import UserError
from sparring.normalize import Normalizer, fit_all
from sparring.policies.policy import Policy, executed_mask
from sparring.policies.vla import parts
from sparring.policies.vla.drawing import Drawing
from sparring.policies.vla.interface import denoises
from sparring.policies.vla.observations import STATE, Observations
from sparring.policies.vla.wrap import called, expected_actions, first_call, mismatch, model_class, wrapped_model
from sparring.policies.vla_configs import VLAConfig


class VLAPolicy(Policy):
    """Acts by the model's `forward` or `sample`, scores by its `evaluate_actions`, judges by its `get_value`."""

    def __init__(self, config: VLAConfig, spec, chunk: int):
        super().__init__()
        if denoises(model_class(config)):
            raise UserError(f"policy.model_class '{config.model_class}' has a flow head; make_policy gives it a policy")
        self.config, self.spec, self.chunk, self.horizon = config, spec, chunk, chunk
        self.padding, self.each = spec.action_padding, spec.action_dim - spec.action_padding
        self.observations = Observations(config, spec)
        # names: an algorithm may let the critic's weights rest, and they are the critic's still
        self.model, self.critic_names = wrapped_model(config, spec, chunk, self.observations)
        self.actions = Normalizer(self.each) if config.normalize_actions else None
        self.drawing = Drawing(
            self.model, expected_actions(spec, chunk), config.draws == "rows", bool(spec.discrete_actions)
        )
        self.noise_size = self.drawing.noise_size
        self._is_tried = False
        self.in_keys = self.observations.in_keys

    # ---- Policy

    @property
    def normalized_keys(self) -> list[tuple[str, ...]]:
        return [("observation", STATE)] if self.observations.normalizer is not None else []

    def act(self, td: TensorDict) -> TensorDict:
        with called(self.model, self.config):
            seen, noise = self._seen(td), td.get("noise", None)
            if noise is None:
                return td.set("action", self._emitted(self.drawing.mode(self.model, seen), len(td)))
            actions, log_prob = self.drawing.draw(self.model, seen, noise)
            td.set("action", self._emitted(actions, len(td)))
            if log_prob is None:
                log_prob, _ = self._evaluated(seen, td["action"])
            td.set("value", self._judged(seen))
        return td.set("trace", self._trace(log_prob, td.batch_size))

    def complete(self, td: TensorDict) -> TensorDict:
        return TensorDict({"log_prob": self._executed_sum(td["trace", "log_prob"], td)}, td.batch_size)

    def evaluate(self, td: TensorDict) -> TensorDict:
        with called(self.model, self.config):
            seen = self.observations(td)
            log_prob, entropy = self._evaluated(seen, td["action"])
            value = self._judged(seen)
        found = {
            "log_prob": self._executed_sum(self._by_position(log_prob, "log_prob"), td),
            "entropy": self._executed_sum(self._by_position(entropy, "entropy"), td).float(),
            "value": value,
        }
        if td.get("trace", None) is not None:
            found["trace"] = self._trace(log_prob, td.batch_size)
        return TensorDict(found, td.batch_size)

    def value(self, td: TensorDict) -> torch.Tensor:
        with called(self.model, self.config):
            return self._judged(self.observations(td))

    def imitation_loss(
        self, td: TensorDict, generator: torch.Generator
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        valid = td["valid"].float()
        with called(self.model, self.config):
            seen = self._seen(td)
            if hasattr(self.model, "imitation_loss"):
                loss = self.model.imitation_loss(seen, self._scored(td["action"]), td["valid"])
                return loss, {"imitation": loss.detach()}
            log_prob, _ = self._evaluated(seen, td["action"])
        # a score of whole chunks cannot leave steps out: only chunks within the episode count
        counted = valid if log_prob.shape == valid.shape else valid.amin(-1)
        loss = -(log_prob.view_as(counted) * counted).sum() / counted.sum().clamp_min(1)
        return loss, {"negative_log_prob": loss.detach()}

    def fit_normalizers(self, statistics: Mapping[str, Mapping[str, np.ndarray]], state: str, action: str) -> None:
        normalizers = (self.observations.normalizer, None, self.actions)
        fit_all(statistics, *(None if getattr(n, "fitted", False) else n for n in normalizers), state, action)

    def update_normalizers(self, td: TensorDict, sum_over_processes) -> None:
        if self.observations.normalizer is not None:
            self.observations.normalizer.update(td["observation", STATE], sum_over_processes)

    def critic_parameters(self) -> list[nn.Parameter]:
        named = dict(self.model.named_parameters())
        return [named[name] for name in self.critic_names]

    def train(self, mode: bool = True) -> "VLAPolicy":
        super().train(mode)
        parts.rest(self.model)
        return self

    # ---- between the model's shapes and ours

    def _seen(self, td: TensorDict) -> TensorDict:
        """What the model is shown; at first it is tried on it."""
        seen = self.observations(td)
        if not self._is_tried:
            # in evaluation mode: a try must not use up random numbers
            training = self.training
            self.eval()
            with torch.no_grad(), first_call(self.model, seen):
                self._emitted(self.drawing.mode(self.model, seen), len(td))
            self.train(training)
            self._is_tried = True
        return seen

    def _emitted(self, actions: torch.Tensor, batch: int) -> torch.Tensor:
        # [B, C * A] -> [B, C, A with padding]
        shape = list(actions.shape)
        if shape != [batch, self.chunk * self.each]:
            raise mismatch(shape, f"{type(self.model).__name__} gave actions of shape", self.spec, self.chunk)
        actions = actions.float().view(batch, self.chunk, self.each)
        actions = actions if self.actions is None else self.actions.inverse(actions)
        return nn.functional.pad(actions, (0, self.padding)) if self.padding else actions

    def _scored(self, action: torch.Tensor) -> torch.Tensor:
        # [B, C, A with padding] -> [B, C * A]
        action = action[..., : self.each]
        return (action if self.actions is None else self.actions(action)).flatten(1)

    def _judged(self, seen: TensorDict) -> torch.Tensor:
        # [B, 1] -> [B]
        value = self.model.get_value(seen)
        if value.numel() != len(seen):
            raise self._shape_error("get_value", value, f"[{len(seen)}, 1]")
        return value.float().view(-1)

    def _evaluated(self, seen: TensorDict, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob and entropy, [B] or [B, C] each."""
        scored = self.model.evaluate_actions(seen, self._scored(action))
        if not isinstance(scored, tuple) or len(scored) != 2:
            raise UserError(
                f"{type(self.model).__name__}.evaluate_actions gave a {type(scored).__name__}; expected two tensors "
                "(log_prob [B], entropy [B])"
            )
        return scored

    def _by_position(self, score: torch.Tensor, what: str) -> torch.Tensor:
        """[B] or [B, C] -> float64 [B, C]. That of a whole chunk stands at its first step, which is always executed."""
        if score.ndim == 2 and score.shape[1] == self.chunk:
            return score.double()
        if score.ndim != 1:
            raise self._shape_error(what, score, f"[B], or [B, {self.chunk}] step by step")
        return nn.functional.pad(score.double()[:, None], (0, self.chunk - 1))

    def _executed_sum(self, per_position: torch.Tensor, td: TensorDict) -> torch.Tensor:
        return per_position[:, 0] if self.chunk == 1 else (per_position * executed_mask(td, self.chunk)).sum(-1)

    def _trace(self, log_prob: torch.Tensor, batch_size) -> TensorDict:
        """All that is known of the distribution is the score itself: the gate compares it, per number scored."""
        by_position = self._by_position(log_prob, "log_prob")
        none = torch.zeros_like(by_position, dtype=torch.float32)
        dims = torch.full_like(none, self.each)
        if log_prob.ndim == 1:
            dims = none.clone()
            dims[:, 0] = self.chunk * self.each
        mean = (by_position / dims.clamp_min(1)).float()[..., None]
        trace = {"log_prob": by_position, "mean": mean, "std": torch.ones_like(mean), "z2": none, "dims": dims}
        return TensorDict(trace, batch_size)

    def _shape_error(self, what: str, given: torch.Tensor, expected: str) -> UserError:
        return UserError(f"{type(self.model).__name__}: {what} has shape {list(given.shape)}, expected {expected}")
