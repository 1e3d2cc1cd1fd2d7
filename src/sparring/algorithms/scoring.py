"""Scores stored decisions without gradients, for the parity gate, the reference KL and off-policy corrections."""

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from sparring.algorithms.configs import AlgorithmConfig
from sparring.errors import UserError
from sparring.policies.policy import Policy
from sparring.processes.distributed import Distributed
from sparring.processes.memory import explain_oom

_CAUSES = (
    "the policy draws new noise in evaluate(); dropout is active; it scores a clipped or padded action; it sums "
    "log-probs over steps of a chunk that were not executed (executed_mask); "
    "its normaliser or weights changed between acting and scoring; or training has diverged so far that rounding "
    "errors show (then lower the learning rate)"
)


class ParityError(UserError):
    """Scoring disagrees with acting: training would silently use wrong probability ratios."""

    exit_code = 1


@dataclass
class Parity:
    """The largest differences between acting and scoring, per term so that sums cannot hide them; 0 without data."""

    # max |mean_replay - mean_rollout| / sigma over steps, positions and dims
    drift: float = 0.0
    # max |z2_replay - z2_rollout|, relative to the number of scored dims; detects a changed sample
    sample: float = 0.0
    # max difference of the number of scored dims; detects padding that is counted
    dims: float = 0.0
    # max |log_prob_replay - log_prob_rollout|, relative to the number of scored dims; detects a wrong sum
    score: float = 0.0
    # max |probability ratio - 1|, for the log only
    ratio: float = 0.0

    @staticmethod
    def limits(tolerance: float) -> dict[str, float]:
        """The limit of each term."""
        # for z = (x - mean) / sigma, a drift d changes z2 by about 2 |z| d and a log-prob by |z| d
        return {"drift": tolerance, "sample": 20 * tolerance, "dims": 0.0, "score": 20 * tolerance}

    @staticmethod
    def worst(parities: "list[Parity]") -> "Parity":
        # a tensor's max propagates NaN, Python's does not
        table = torch.tensor([astuple(p) for p in (Parity(), *parities)], dtype=torch.float64)
        return Parity(*table.amax(0).tolist())

    def excesses(self, tolerance: float) -> dict[str, float]:
        """The terms above their limits; empty if scoring agrees with acting."""
        limits = self.limits(tolerance)
        # `not <=` also catches NaN
        return {name: getattr(self, name) for name, limit in limits.items() if not getattr(self, name) <= limit}

    def check(self, tolerance: float) -> None:
        limits, wrong = self.limits(tolerance), self.excesses(tolerance)
        if wrong:
            found = ", ".join(f"{name} {value:.3g} > {limits[name]:g}" for name, value in wrong.items())
            raise ParityError(
                f"the parity gate refuses to train: {found}. Scoring the stored actions with unchanged "
                f"weights does not reproduce the values from acting. Likely causes: {_CAUSES}."
            )


@torch.no_grad()
def measure_parity(acted: TensorDict, scored: TensorDict, averaged: bool = False) -> Parity:
    """Compare stored decisions `acted [B]` with evaluate() of them, `scored [B]`. `averaged`: log-probs are means."""
    old, new = acted["trace"], scored["trace"]
    # [B, C]: positions that were executed
    positions = torch.arange(old["z2"].shape[1], device=old["z2"].device)
    mask = positions < acted["next", "executed"][:, None]
    drift = ((new["mean"] - old["mean"]).abs() / new["std"]).flatten(2).amax(-1)
    sample = (new["z2"] - old["z2"]).abs() / old["dims"].clamp_min(1)
    # the number of scored dims at all positions, executed or not
    dims = (new["dims"] - old["dims"]).abs()
    # [B, 1], or [B, S] if denoising steps are scored one by one
    change = (scored["log_prob"].double() - acted["log_prob"].double()).reshape(len(mask), -1)
    # [B]
    score = change.abs().sum(-1)
    if not averaged:
        score = score / (old["dims"] * mask).sum(-1).clamp_min(1)
    ratio = (change.exp() - 1).abs()
    drift, sample, dims = (torch.where(mask, x, 0.0) for x in (drift, sample, dims))
    return Parity(*(float(x.max()) for x in (drift, sample, dims, score, ratio)))


# decisions scored in one forward pass without gradients, unless micro_batch_size limits it
_SCORED_AT_ONCE = 4096
# decisions per rollout that an asynchronous collector checks, after a first whole rollout: the robots wait for it
_REPLAYED = 64


class Decisions:
    """The decisions `flat [T*N]` of a rollout; `rows` selects those to learn from (default: the valid ones)."""

    def __init__(self, flat: TensorDict, rows: Tensor | None = None):
        if rows is None:
            valid = flat.get("valid", None)
            device = flat["action"].device
            rows = torch.arange(len(flat), device=device) if valid is None else valid.nonzero()[:, 0]
        self.flat, self.rows = flat, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key) -> Tensor:
        return self.flat[key][self.rows]

    def where(self, chosen: Tensor) -> "Decisions":
        """The subset selected by a mask or by indices."""
        return Decisions(self.flat, self.rows[chosen])

    def on_policy(self) -> "Decisions":
        """The decisions taken with the current weights."""
        return self if self.flat.get("age", None) is None else self.where(self["age"] == 0)

    def columns(self, keys: list) -> dict[Any, Tensor]:
        return {key: self.flat.get(key) for key in keys}

    @staticmethod
    def gather(columns: dict[Any, Tensor], index: Tensor) -> TensorDict:
        """Rows `index` of every column; three times as fast as indexing a TensorDict."""
        batch = TensorDict({}, [len(index)])
        for key, column in columns.items():
            batch.set(key, column.index_select(0, index))
        return batch

    def update_normalizers(self, policy: Policy, distributed: Distributed) -> None:
        seen, keys = self.flat, policy.normalized_keys
        if len(self) < len(self.flat):
            # only the keys that are normalised: images are most of the data
            seen = self.gather(self.columns(policy.in_keys if keys is None else keys), self.rows)
        policy.update_normalizers(seen, distributed.sum)

    def spread(self, name: str, distributed: Distributed) -> dict[str, float]:
        """Mean and standard deviation of a column over all processes, as metrics."""
        values = self[name].double()
        sums = torch.stack([torch.ones_like(values), values, values.square()]).sum(1)
        count, total, squares = distributed.sum(sums).tolist()
        mean = total / count
        return {f"{name}_mean": mean, f"{name}_std": math.sqrt(max(0.0, squares / count - mean**2))}


class Scorer:
    """Runs evaluate() of a policy, and of a frozen reference, in parts that fit into memory."""

    def __init__(
        self, config: AlgorithmConfig, policy: Policy, distributed: Distributed, section: str = "algorithm_config"
    ):
        """`section`: the config section with the settings, for messages."""
        self.config, self.policy, self.distributed, self.section = config, policy, distributed, section
        self.at_once = config.micro_batch_size or _SCORED_AT_ONCE
        # a copy of the policy before the first update, if kl_coef > 0
        self.reference: Policy | None = None
        self.replayed_rollout = False

    def parts(self, policy: Policy, decisions: Decisions, doing: str) -> Iterator[tuple[Tensor, TensorDict]]:
        """Yield (rows of a part, evaluate() of it). `doing`: for the message if memory runs out."""
        for index in decisions.rows.split(self.at_once) if len(decisions) else ():
            with torch.no_grad(), self.memory(doing, len(index)):
                scored = policy.evaluate(decisions.flat.select(*self._keys())[index])
            yield index, scored

    def parity(self, decisions: Decisions) -> Parity:
        """The parity of decisions that were taken with the current weights."""
        acted = decisions.flat.select("trace", "log_prob", ("next", "executed"))
        parts, averaged = self.parts(self.policy, decisions, "scoring"), self.policy.averages_log_prob
        return Parity.worst([measure_parity(acted[index], scored, averaged) for index, scored in parts])

    def replay(self, rollout: TensorDict, version: int) -> Parity:
        """The parity of the decisions of this `version` in a rollout [T, N]: all of the first rollout, later a sample.

        Called by the actor process: when the learner gets the rollout, its weights may be newer.
        """
        decisions = Decisions(rollout.flatten(0, 1))
        if rollout.get("version", None) is not None:
            decisions = decisions.where(decisions["version"] >= version)
        if self.replayed_rollout:
            # a different sample each time
            order = torch.randperm(len(decisions), generator=torch.Generator().manual_seed(version))
            decisions = decisions.where(order[:_REPLAYED].to(decisions.rows.device))
        self.replayed_rollout |= len(decisions) > 0
        return self.parity(decisions)

    def freeze_reference(self) -> None:
        """Copy the policy as the KL reference, once, if kl_coef > 0."""
        if self.config.kl_coef and self.reference is None:
            with self.memory(f"copying the policy for {self.section}.kl_coef={self.config.kl_coef:g}"):
                self.reference = self._frozen_policy()

    @torch.no_grad()
    def add_reference(self, decisions: Decisions) -> list[str]:
        """Add `reference_log_prob` if kl_coef > 0; returns the added keys."""
        if not self.config.kl_coef or self.reference is None:
            return []
        log_prob = torch.zeros_like(decisions.flat["log_prob"])
        for index, scored in self.parts(self.reference, decisions, "scoring with the reference policy"):
            log_prob[index] = scored["log_prob"]
        decisions.flat["reference_log_prob"] = log_prob
        return ["reference_log_prob"]

    def reference_state(self) -> dict[str, Tensor] | None:
        if self.reference is None:
            return None
        shared = {name for name, weight in self.policy.named_parameters() if not weight.requires_grad}
        return {name: weight for name, weight in self.reference.state_dict().items() if name not in shared}

    def load_reference(self, state: dict[str, Tensor]) -> None:
        self.reference = self._frozen_policy()
        self.reference.load_state_dict(self.policy.state_dict() | state)

    def memory(self, doing: str, decisions: int = 0) -> AbstractContextManager[None]:
        """A context whose out-of-memory error names the setting to lower."""
        return explain_oom(doing, self.policy, decisions, f"{self.section}.micro_batch_size")

    def _frozen_policy(self) -> Policy:
        """A copy that shares frozen weights: for a VLA with LoRA it takes only the memory of the adapters."""
        shared = {id(weight): weight for weight in self.policy.parameters() if not weight.requires_grad}
        return copy.deepcopy(self.policy, shared).requires_grad_(False).eval()

    def _keys(self) -> list:
        """The keys that evaluate() reads. The whole trace: selecting one of its entries too would drop the others."""
        read = [key for key in self.policy.in_keys if key[0] != "trace"]
        return [*read, "action", "trace", ("next", "executed")]


class ParityGate:
    """Refuses to train if scoring disagrees with acting.

    The first rollout of a process is checked completely. Later updates check their first minibatch before its gradient
    step, because the loss evaluates it with unchanged weights anyway.
    """

    def __init__(self, scorer: Scorer):
        self.scorer, self.checked_rollout = scorer, False
        # the parity of this update; None: not measured yet
        self.parity: Parity | None = None
        self.measured: list[Parity] = []

    def begin_update(self, decisions: Decisions, whole: bool = False) -> None:
        """Start an update. `whole`: check all decisions, not only the first minibatch."""
        self.parity, self.measured = None, []
        if whole or not self.checked_rollout:
            current = decisions.on_policy()
            self.checked_rollout = bool(self.scorer.distributed.max(len(current)))
            self.parity = self.check(self.scorer.parity(current))

    def compare(self, batch: TensorDict, scored: TensorDict) -> None:
        """Measure the first minibatch; only its on-policy decisions were taken with the weights that score them."""
        if self.parity is not None:
            return
        if batch.get("age", None) is not None:
            current = batch["age"] == 0
            batch, scored = batch[current], scored[current]
        if len(batch):
            self.measured.append(measure_parity(batch, scored, self.scorer.policy.averages_log_prob))

    def require_passed(self) -> Parity:
        """Call before a gradient step: raises if the first minibatch did not pass."""
        if self.parity is None:
            self.parity = self.check(Parity.worst(self.measured))
        return self.parity

    def metrics(self) -> dict[str, float]:
        parity = self.require_passed()
        return {"parity": parity.drift, "parity_ratio": parity.ratio}

    def check(self, parity: Parity) -> Parity:
        """Returns the worst parity over all processes; raises if it exceeds the tolerance."""
        # all processes must stop together
        parity = Parity(*(self.scorer.distributed.max(value) for value in astuple(parity)))
        parity.check(self.scorer.config.parity_tolerance)
        return parity
