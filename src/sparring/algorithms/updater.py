"""Updater: gradient steps over the decisions of a rollout. What PPO and GRPO share."""

import copy
from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import nn

from sparring.algorithms.configs import UpdaterConfig
from sparring.algorithms.gradient_step import FlatParameters, scheduled, warmup
from sparring.algorithms.losses import LossTerms, approximate_kl, join_terms
from sparring.algorithms.parity import Parity, worst
from sparring.algorithms.scoring import Scorer
from sparring.policies.policy import Policy
from sparring.processes.distributed import Distributed

Loss = Callable[[TensorDict, TensorDict], tuple[torch.Tensor, LossTerms]]


class Updater(Scorer):
    """A policy's parameters, their optimiser, and the walk over minibatches.

    A subclass brings its parameter groups, its advantages and its loss, and has `update(rollout, progress) -> metrics`.
    The reference of the optional KL is the policy as it is when the first update begins.
    """

    def __init__(self, config: UpdaterConfig, policy: Policy, distributed: Distributed | None = None, seed: int = 0):
        super().__init__(config, policy, distributed or Distributed("cpu"))
        self.distributed.unite(policy)
        with self._memory_told("making room for gradients"):
            self.flat = [(FlatParameters(parameters), lr) for parameters, lr in self._groups() if parameters]
        self.optimizer = torch.optim.Adam(
            [{"params": [flat.vector], "lr": lr, "base_lr": lr} for flat, lr in self.flat],
            eps=config.adam_eps,
            fused=True,
        )
        self.seed = seed

    def state_dict(self) -> dict:
        reference = None
        if self.reference is not None:
            shared = {name for name, weight in self.policy.named_parameters() if not weight.requires_grad}
            reference = {name: w for name, w in self.reference.state_dict().items() if name not in shared}
        return {"optimizer": self.optimizer.state_dict(), "updates": self.updates, "reference": reference}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
        # PPO had none in older checkpoints
        if state.get("reference") is not None:
            self.reference = _frozen(self.policy)
            self.reference.load_state_dict(self.policy.state_dict() | state["reference"])

    # ---- for subclasses

    def _groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Which parameters learn, and how fast."""
        return [(actor_parameters(self.policy), self.config.policy_lr)]

    def _begin(self, progress: float) -> float:
        """An update begins; its learning rate."""
        config = self.config
        if config.kl_coef and self.reference is None:
            with self._memory_told(f"copying the policy for {self.section}.kl_coef={config.kl_coef:g}"):
                self.reference = _frozen(self.policy)
        for parameters, _ in self.flat:
            parameters.check()
        factor = scheduled(config.lr_schedule, progress) * warmup(self.updates, config.warmup_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        return config.policy_lr * factor

    def _learn(
        self,
        flat: TensorDict,
        rows: torch.Tensor,
        keys: list,
        epochs: int,
        loss: Loss,
        learning: list[FlatParameters] | None = None,
        normalize_advantage: bool = False,
    ) -> tuple[list[LossTerms], Parity]:
        """`epochs` times over `rows` of the decisions `flat [T*N]`, in minibatches; stops past the target KL.

        `keys`: what the loss needs beside the observations. `learning`: the parameters that change; None: all.
        """
        parity = None if self.checked_whole_rollout else self._whole_parity(flat, rows)
        columns = {key: flat.get(key) for key in [*self.policy.in_keys, *keys]}
        learning = learning or [parameters for parameters, _ in self.flat]
        terms: list[LossTerms] = []
        # a function of (seed, process, update): nothing to save
        shuffle = torch.Generator().manual_seed((self.seed * 1_000_003 + self.updates) * 1009 + self.distributed.rank)
        count = self._minibatch_count(len(rows))
        for _ in range(epochs):
            first_of_epoch = len(terms)
            order = rows[torch.randperm(len(rows), generator=shuffle).to(rows.device)]
            for index in self._minibatches(order, count):
                batch = gather(columns, index)
                if normalize_advantage and len(index) > 1:
                    std, mean = torch.std_mean(batch["advantage"])
                    batch["advantage"] = (batch["advantage"] - mean) / (std + 1e-8)
                if parity is None:
                    batch["trace"] = flat["trace"][index]
                term, parities = self._gradients(batch, loss, gated=parity is None)
                if parity is None:
                    # before any gradient step
                    parity = self.gate(worst(parities))
                term.scalars["grad_norm"] = self._step(learning)
                terms.append(term)
            if self._past_target_kl(terms[first_of_epoch:]):
                break
        return terms, parity

    def _end(self, flat: TensorDict, rows: torch.Tensor) -> None:
        """The normalisers see the observations of `rows`, and the update is over."""
        seen, keys = flat, self.policy.normalized_keys
        if len(rows) < len(flat):
            # not the pictures, which are most of it
            seen = gather({key: flat.get(key) for key in (self.policy.in_keys if keys is None else keys)}, rows)
        self.policy.update_normalizers(seen, self.distributed.sum)
        self.updates += 1

    # ---- one gradient step

    def _gradients(self, batch: TensorDict, loss: Loss, gated: bool) -> tuple[LossTerms, list[Parity]]:
        """Of a minibatch, added up over its micro-batches; and their parity where it is `gated`."""
        for parameters, _ in self.flat:
            parameters.vector.grad.zero_()
        size = self.config.micro_batch_size
        parts = batch.split(size) if size else [batch]
        terms, parities, shares = [], [], [len(part) / len(batch) for part in parts]
        for part, share in zip(parts, shares, strict=True):
            with self._memory_told("working out gradients", len(part)):
                scored = self.policy.evaluate(part)
                if gated:
                    parities.append(self._parity(part, scored))
                cost, term = loss(part, scored)
                (cost if len(parts) == 1 else cost * share).backward()
            terms.append(term)
        return join_terms(terms, shares), parities

    def _step(self, learning: list[FlatParameters]) -> torch.Tensor:
        """A step of the optimiser, with gradients of all processes; their norm before they are clipped."""
        gradients = [parameters.vector.grad for parameters in learning]
        for gradient in gradients:
            self.distributed.average_(gradient)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        shrink = (self.config.max_grad_norm / (norm + 1e-6)).clamp_max(1.0)
        for gradient in gradients:
            gradient.mul_(shrink)
        # without a gradient Adam leaves values and moments as they are
        resting = [(p.vector, p.vector.grad) for p, _ in self.flat if not any(p is q for q in learning)]
        for vector, _ in resting:
            vector.grad = None
        with self._memory_told("taking a gradient step"):
            self.optimizer.step()
        for vector, gradient in resting:
            vector.grad = gradient
        return norm

    def _minibatch_count(self, decisions: int) -> int:
        return int(self.distributed.max(-(-decisions // self.config.mini_batch_size)))

    def _minibatches(self, order: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        """`count` of them. Processes step together, so one that has fewer decisions takes smaller minibatches."""
        # evenly: a last one of few decisions would weigh as much as the others
        return order.repeat(-(-count // len(order))).tensor_split(count)

    def _past_target_kl(self, epoch: list[LossTerms]) -> bool:
        """Every process must answer alike, so the KL is averaged over them first."""
        if self.config.target_kl is None:
            return False
        kl = approximate_kl(torch.cat([term.log_ratio for term in epoch]))
        return self.distributed.mean({"kl": float(kl)})["kl"] > self.config.target_kl


def actor_parameters(policy: Policy) -> list[nn.Parameter]:
    """Those that learn and are not the critic's."""
    critic = {id(p) for p in policy.critic_parameters()}
    return [p for p in policy.parameters() if p.requires_grad and id(p) not in critic]


def _frozen(policy: Policy) -> Policy:
    """As it is now. What does not learn is shared: beside a VLA with LoRA it takes the room of the adapters only."""
    shared = {id(weight): weight for weight in policy.parameters() if not weight.requires_grad}
    return copy.deepcopy(policy, shared).requires_grad_(False).eval()


def gather(columns: dict, index: torch.Tensor) -> TensorDict:
    """Rows `index` of every column, as a TensorDict: a third of the time that indexing one takes."""
    batch = TensorDict({}, [len(index)])
    for key, column in columns.items():
        batch.set(key, column.index_select(0, index))
    return batch
