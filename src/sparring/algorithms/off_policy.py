"""Decisions that older weights took (formulas.md, section 2): how old they are, and what they weigh in an update.

Three policies have a say: the one that acted (`log_prob`), the one with which the update begins (proximal), and the one
that learns. `w = proximal / acted` makes up for what changed before the update and is a constant of it;
`r = learning / proximal` is PPO's ratio, clipped as ever. V-trace puts `rho`, its own cut of w, in the place of w.
"""

import torch
from tensordict import TensorDict

from sparring.algorithms.configs import UpdaterConfig
from sparring.algorithms.losses import LARGEST_LOG_RATIO, LossTerms
from sparring.processes.distributed import Distributed


def ages_of(rollout: TensorDict, version: int) -> torch.Tensor:
    """By how many versions the weights that acted are behind `version`, `[T, N]`; 0 where nobody stamped them."""
    stamped = rollout.get("version", None)
    if stamped is None:
        return torch.zeros_like(rollout["next", "executed"])
    return (version - stamped).clamp_min(0)


def ratio_and_weight(
    config: UpdaterConfig, batch: TensorDict, scored: TensorDict
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`log r` of a minibatch and its w, as large as it is; w is None where all is fresh or nothing is corrected.

    Both are [B], or [B, S] where denoising steps count one by one.
    """
    acted, present = batch["log_prob"], scored["log_prob"]
    if config.correction == "none" or batch.get("age", None) is None:
        # in float64 where the policy scores so; their difference is small
        return (present - acted).float(), None
    if config.proximal == "interpolated":
        proximal = interpolated(acted, present.detach(), batch["age"])
    else:
        proximal = batch["proximal_log_prob"]
    return (present - proximal).float(), weight_of(config, acted, proximal)


def interpolated(acted: torch.Tensor, present: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
    """A-3PO's proximal log-prob: as far from acting to learning as its version is between theirs.

    The weights that learn are on their way to the version after the proximal one, which is `age` past the one that
    acted: alpha = (v_learning - 1 - v_acted) / (v_learning - v_acted) = age / (age + 1).
    """
    alpha = age / (age + 1.0)
    # [B] -> [B, 1] beside [B, S]
    return acted + alpha.view(-1, *[1] * (acted.dim() - 1)) * (present - acted)


def weight_of(config: UpdaterConfig, acted: torch.Tensor, proximal: torch.Tensor) -> torch.Tensor:
    """`w = proximal / acted` from log-probs [B] or [B, S]; V-trace judges a decision as a whole, [B] or [B, 1]."""
    log_weight = (proximal - acted).float()
    if config.correction == "vtrace" and log_weight.dim() == 2:
        log_weight = log_weight.sum(-1, keepdim=True)
    return log_weight.clamp_max(LARGEST_LOG_RATIO).exp()


def counted(config: UpdaterConfig, weight: torch.Tensor) -> torch.Tensor:
    """What of a weight enters the loss: decoupled drops a decision past the cap, the others cut its weight there."""
    cap = cap_of(config)
    return torch.where(weight > cap, 0.0, weight) if config.correction == "decoupled" else weight.clamp_max(cap)


def cap_of(config: UpdaterConfig) -> float:
    return config.rho_bar if config.correction == "vtrace" else config.weight_cap


def present_values(rollout: TensorDict, value: torch.Tensor) -> TensorDict:
    """The rollout as the present critic sees it, `value` [T, N].

    `next/value` is that of the row below; where an episode or the rollout ends there is none, and the stored one stays.
    """
    following = rollout["next"]
    goes_on = ~(following["terminated"] | following["truncated"])[:-1]
    after = following["value"].clone()
    after[:-1] = torch.where(goes_on, value[1:], after[:-1])
    return rollout.copy().set("value", value).set("next", following.copy().set("value", after))


def weight_metrics(config: UpdaterConfig, terms: list[LossTerms], distributed: Distributed) -> dict[str, float]:
    """Of an update, over all processes; nothing where nothing was weighed.

    `ess`: effective sample size of the weights that were counted, `(sum w)^2 / (N sum w^2)`: the share of its decisions
    that the update is worth. The others tell of the weights before any cap.
    """
    weights = [term.weight for term in terms if term.weight is not None]
    if not weights:
        return {}
    weight = torch.cat(weights).flatten().double()
    used = counted(config, weight)
    past = (weight > cap_of(config)).double()
    sums = torch.stack([torch.ones_like(weight), weight, past, used, used.square()]).sum(1)
    number, total, masked, effective, squares = distributed.sum(sums).tolist()
    return {
        "ess": effective**2 / (number * squares) if squares else 0.0,
        "weight_mean": total / number,
        "weight_max": distributed.max(float(weight.max())),
        "weight_masked": masked / number,
    }


def fresh_metrics(config: UpdaterConfig) -> dict[str, float]:
    """Of an update among stale ones that learned from fresh data: nothing is behind, and all of it counts as it is."""
    ages = {"staleness_mean": 0.0, "staleness_max": 0.0, "parity_skipped": 0.0}
    weights = {"ess": 1.0, "weight_mean": 1.0, "weight_max": 1.0, "weight_masked": 0.0}
    return ages if config.correction == "none" else ages | weights
