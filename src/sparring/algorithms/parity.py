"""Parity: does scoring a stored decision again, with unchanged weights, give back what acting gave?"""

from dataclasses import astuple, dataclass

import torch
from tensordict import TensorDict

from sparring.errors import UserError

_CAUSES = (
    "the policy draws new noise in evaluate(), is left in a mode with dropout, scores a clipped or padded action, sums "
    "log-probs over steps of a chunk that were not executed (executed_mask), "
    "or its normaliser or weights changed between acting and scoring"
)


class ParityError(UserError):
    """Scoring disagrees with acting: training on such numbers would go wrong silently."""

    exit_code = 1


@dataclass
class Parity:
    """The largest differences, of terms that no sum can hide or blow up; 0 where there was nothing to compare."""

    # max |mean_replay - mean_rollout| / sigma over steps, positions and dims
    drift: float = 0.0
    # max |z2_replay - z2_rollout|, relative to the number of scored dims; catches a sample that was changed
    sample: float = 0.0
    # max difference of the number of scored dims; catches counted padding
    dims: float = 0.0
    # max |log_prob_replay - log_prob_rollout|, relative to the number of scored dims; catches a wrong sum
    score: float = 0.0
    # max |probability ratio - 1|, for the log only
    ratio: float = 0.0

    @staticmethod
    def limits(tolerance: float) -> dict[str, float]:
        """The largest that each term may be."""
        # z = (x - mean)/sigma of a few sigmas turns a drift d into about 2 |z| d of z2, and |z| d of a log-prob
        return {"drift": tolerance, "sample": 20 * tolerance, "dims": 0.0, "score": 20 * tolerance}

    @staticmethod
    def worst(parities: "list[Parity]") -> "Parity":
        # a tensor's max passes NaN on, Python's does not
        table = torch.tensor([astuple(p) for p in (Parity(), *parities)], dtype=torch.float64)
        return Parity(*table.amax(0).tolist())

    def excesses(self, tolerance: float) -> dict[str, float]:
        """The terms that are over their limits; none where scoring agrees with acting."""
        limits = self.limits(tolerance)
        # `not <=` also catches NaN
        return {name: getattr(self, name) for name, limit in limits.items() if not getattr(self, name) <= limit}

    def check(self, tolerance: float) -> None:
        limits, wrong = self.limits(tolerance), self.excesses(tolerance)
        if wrong:
            found = ", ".join(f"{name} {value:.3g} > {limits[name]:g}" for name, value in wrong.items())
            raise ParityError(
                f"the parity gate refuses to train: {found}. Scoring the stored actions with unchanged "
                f"weights does not give back what acting gave. Likely causes: {_CAUSES}."
            )


@torch.no_grad()
def measure_parity(acted: TensorDict, scored: TensorDict, averaged: bool = False) -> Parity:
    """`acted [B]` is what the collector stored, `scored [B]` is evaluate() of it; `averaged`: log-probs are means."""
    old, new = acted["trace"], scored["trace"]
    # [B, C]: positions that were executed
    positions = torch.arange(old["z2"].shape[1], device=old["z2"].device)
    mask = positions < acted["next", "executed"][:, None]
    drift = ((new["mean"] - old["mean"]).abs() / new["std"]).flatten(2).amax(-1)
    sample = (new["z2"] - old["z2"]).abs() / old["dims"].clamp_min(1)
    # what was counted, not only where
    dims = (new["dims"] - old["dims"]).abs()
    # [B, 1], or [B, S] where denoising steps are scored one by one
    change = (scored["log_prob"].double() - acted["log_prob"].double()).reshape(len(mask), -1)
    # [B]
    score = change.abs().sum(-1)
    if not averaged:
        score = score / (old["dims"] * mask).sum(-1).clamp_min(1)
    ratio = (change.exp() - 1).abs()
    drift, sample, dims = (torch.where(mask, x, 0.0) for x in (drift, sample, dims))
    return Parity(*(float(x.max()) for x in (drift, sample, dims, score, ratio)))
