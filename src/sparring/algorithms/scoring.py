"""Scorer: what a policy says of stored decisions, without gradients. For the gate, a reference, and what is stale."""

from collections.abc import Iterator
from dataclasses import astuple

import torch
from tensordict import TensorDict

from sparring.algorithms.configs import UpdaterConfig
from sparring.algorithms.losses import LossTerms
from sparring.algorithms.off_policy import ages_of, fresh_metrics, weight_metrics
from sparring.algorithms.parity import NOTHING, Parity, measure_parity, worst
from sparring.errors import UserError
from sparring.policies.policy import Policy
from sparring.processes.distributed import Distributed
from sparring.processes.memory_errors import memory_told

# decisions that are scored together without gradients, where memory does not limit them
SCORED_AT_ONCE = 4096
# of a rollout, decisions that who collected it scores again, after a first whole one: robots wait meanwhile
REPLAYED = 64


class Scorer:
    """The half of an Updater that looks at a rollout before anything is learned from it."""

    # of the config, where its settings are
    section = "algorithm_config"

    def __init__(self, config: UpdaterConfig, policy: Policy, distributed: Distributed):
        self.config, self.policy, self.distributed = config, policy, distributed
        # so far; also the version of the weights: a rollout stamped with an older one is stale
        self.updates = 0
        self.reference: Policy | None = None
        self.checked_whole_rollout = False
        self.expects_stale = False

    def score(self, flat: TensorDict) -> TensorDict:
        """evaluate() of a whole rollout, in minibatches, without gradients."""
        with torch.no_grad(), self._memory_told("scoring", min(self._at_once, len(flat))):
            parts = flat.select(*self._scoring_keys()).split(self._at_once)
            return torch.cat([self.policy.evaluate(part) for part in parts])

    def expect_stale(self) -> None:
        """For whoever is about to collect stale decisions, and counts versions.

        An update then tells their age also where all are fresh, and PPO's normalize_value knows what was judged before
        its first one.
        """
        self.check_correctable()
        self.expects_stale = True

    def check_correctable(self) -> None:
        """Refuses a policy whose stale decisions cannot be corrected."""
        if self.config.correction == "none" or self.policy.scores_all:
            return
        raise UserError(
            f"{self.section}.correction={self.config.correction}: {type(self.policy).__name__} scores only some of its "
            "denoising steps (policy.method=flow_sde_one_step, or fewer policy.denoising_steps than there are), and a "
            "ratio of such scores is not that of two policies: what older weights decided cannot be corrected. Set "
            f"policy.method=flow_sde or flow_noise, learn from fresh data only, or set {self.section}.correction=none. "
            "In a loop of your own, collector.version must count the updates, or fresh data looks stale"
        )

    # ---- stale decisions

    def _look_back(self, rollout: TensorDict) -> list[str]:
        """Adds `age` where older weights than the present ones acted, and what correcting takes; the keys it added.

        Where all of the rollout is fresh, in every process, there are none.
        """
        age = ages_of(rollout, self.updates)
        # alike in every process: they tell the same metrics
        if self.distributed.max(float(age.max())) == 0:
            # another algorithm may have looked at it before
            rollout.pop("age", None)
            return []
        rollout["age"] = age
        if self.config.correction == "none":
            return ["age"]
        self.check_correctable()
        if self.config.proximal == "interpolated":
            return ["age"]
        flat = rollout.flatten(0, 1)
        rows = valid_rows(flat)
        # what is fresh keeps what it was given when it acted
        log_prob, value = flat["log_prob"].clone(), flat["value"].clone()
        for index, scored in self._scored(self.policy, flat, rows[flat["age"][rows] > 0], "scoring stale decisions"):
            log_prob[index], value[index] = scored["log_prob"].to(log_prob.dtype), scored["value"].to(value.dtype)
        rollout["proximal_log_prob"] = log_prob.unflatten(0, rollout.batch_size)
        rollout["proximal_value"] = value.unflatten(0, rollout.batch_size)
        return ["age", "proximal_log_prob", "proximal_value"]

    def _stale_metrics(self, flat: TensorDict, rows: torch.Tensor, terms: list[LossTerms]) -> dict[str, float]:
        """How old the data was and what it was worth; nothing where none is ever stale."""
        if flat.get("age", None) is None:
            return fresh_metrics(self.config) if self.expects_stale else {}
        age = flat["age"][rows]
        means = {"staleness_mean": float(age.float().mean()), "parity_skipped": float((age > 0).float().mean())}
        oldest = {"staleness_max": self.distributed.max(float(age.max()))}
        return self.distributed.mean(means) | oldest | weight_metrics(self.config, terms, self.distributed)

    # ---- the parity gate

    def _whole_parity(self, flat: TensorDict, rows: torch.Tensor) -> Parity:
        """The gate over every stored decision, once per process; later updates check their first minibatch for free."""
        if flat.get("age", None) is not None:
            rows = rows[flat["age"][rows] == 0]
        self.checked_whole_rollout = bool(self.distributed.max(len(rows)))
        return self.gate(self._replayed(flat, rows))

    def replay(self, rollout: TensorDict, version: int) -> Parity:
        """Of what the policy decided with the weights that it has, of this `version`: all once, then a few.

        For who collects: by the time a rollout is learned from, the learner's weights may be others.
        """
        flat = rollout.flatten(0, 1)
        rows = valid_rows(flat)
        rows = rows[ages_of(flat, version)[rows] == 0]
        if self.checked_whole_rollout:
            # others each time
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(version))
            rows = rows[order[:REPLAYED].to(rows.device)]
        self.checked_whole_rollout |= len(rows) > 0
        return self._replayed(flat, rows)

    def _replayed(self, flat: TensorDict, rows: torch.Tensor) -> Parity:
        """Of decisions that were taken by the weights of now."""
        acted = flat.select("trace", "log_prob", ("next", "executed"))
        parts = self._scored(self.policy, flat, rows, "scoring")
        return worst([measure_parity(acted[i], scored, self.policy.averages_log_prob) for i, scored in parts])

    def _parity(self, acted: TensorDict, scored: TensorDict) -> Parity:
        """Of a minibatch: only its fresh decisions were taken by the weights that scored them."""
        if acted.get("age", None) is not None:
            fresh = acted["age"] == 0
            if not fresh.any():
                return NOTHING
            acted, scored = acted[fresh], scored[fresh]
        return measure_parity(acted, scored, self.policy.averages_log_prob)

    def gate(self, parity: Parity) -> Parity:
        """The worst of all processes; raises where that is too much."""
        # all processes must stop together, whichever of them found the fault
        parity = Parity(*(self.distributed.max(value) for value in astuple(parity)))
        parity.check(self.config.parity_tolerance)
        return parity

    # ---- scoring

    @torch.no_grad()
    def _score_by_reference(self, flat: TensorDict, rows: torch.Tensor) -> list[str]:
        """Adds `reference_log_prob` of these decisions, where a KL is asked for; the keys that it added."""
        if not self.config.kl_coef:
            return []
        log_prob = torch.zeros_like(flat["log_prob"])
        for index, scored in self._scored(self.reference, flat, rows, "scoring by the policy as it was"):
            log_prob[index] = scored["log_prob"]
        flat["reference_log_prob"] = log_prob
        return ["reference_log_prob"]

    def _scored(
        self, policy: Policy, flat: TensorDict, rows: torch.Tensor, doing: str
    ) -> Iterator[tuple[torch.Tensor, TensorDict]]:
        """These rows in parts that fit into memory: (numbers of a part, evaluate() of it, without gradients)."""
        keys = self._scoring_keys()
        for index in rows.split(self._at_once) if len(rows) else ():
            with torch.no_grad(), self._memory_told(doing, len(index)):
                scored = policy.evaluate(flat.select(*keys)[index])
            yield index, scored

    def _scoring_keys(self) -> list:
        """What evaluate() reads, with the whole trace: to select an entry of it as well would leave only that one."""
        read = [key for key in self.policy.in_keys if key[0] != "trace"]
        return [*read, "action", "trace", ("next", "executed")]

    @property
    def _at_once(self) -> int:
        """Decisions that are scored together where no gradients are needed."""
        return self.config.micro_batch_size or SCORED_AT_ONCE

    def _memory_told(self, doing: str, decisions: int = 0):
        return memory_told(doing, self.policy, decisions, f"{self.section}.micro_batch_size")


def valid_rows(flat: TensorDict) -> torch.Tensor:
    """Numbers of the decisions `[T*N]` that count: all, or those of whole episodes (`valid`)."""
    valid = flat.get("valid", None)
    device = flat["action"].device
    return torch.arange(len(flat), device=device) if valid is None else valid.nonzero()[:, 0]
