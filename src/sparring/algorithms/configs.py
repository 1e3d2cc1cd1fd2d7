"""The `ppo` and `grpo` sections. Torch-free."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from sparring.config.section import Section


class AlgorithmConfig(Section):
    """Gradient-step settings that every algorithm has."""

    mini_batch_size: int = Field(512, gt=0, description="decisions per gradient step, on each process")
    micro_batch_size: int | None = Field(
        None, gt=0, description="decisions per backward pass; gradients accumulate to a minibatch; null: all at once"
    )
    policy_lr: float = Field(1e-3, gt=0, description="learning rate of the policy without its critic")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="decay of the learning rates to 0 over the run"
    )
    warmup_updates: int = Field(0, ge=0, description="updates over which learning rates rise from 0")
    max_grad_norm: float = Field(0.5, gt=0, description="gradients are clipped to this norm")
    target_kl: float | None = Field(
        None, gt=0, description="an update ends after the first epoch whose KL exceeds this; null: off"
    )
    adam_eps: float = Field(1e-5, gt=0, description="Adam's epsilon")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the initial policy of the run; 0: not computed")
    parity_tolerance: float = Field(
        1e-4, gt=0, description="largest allowed difference between acting and scoring, in sigmas (the parity gate)"
    )
    correction: Literal["none", "truncated", "decoupled"] = Field(
        "decoupled", description="off-policy correction for stale decisions; on-policy data needs none"
    )
    weight_cap: float = Field(
        2.0,
        ge=1,
        description="limit of importance weights: decoupled drops larger ones, truncated caps them; not for vtrace",
    )
    proximal: Literal["exact", "interpolated"] = Field(
        "exact", description="proximal log-probs of stale decisions: scored again, or interpolated by version"
    )


class PPOConfig(AlgorithmConfig):
    """Clipped PPO."""

    correction: Literal["none", "truncated", "decoupled", "vtrace"] = Field(  # type: ignore[assignment]
        "vtrace", description="off-policy correction for stale decisions; on-policy data needs none"
    )
    rho_bar: float = Field(1.0, ge=1, description="vtrace: cap of the importance weight of a decision (rho)")
    c_bar: float = Field(1.0, gt=0, description="vtrace: cap of the trace coefficients (c), which carry TD errors back")
    clip_ratio: float = Field(0.2, gt=0, lt=1, description="the probability ratio is clipped to 1 +- this")
    clip_schedule: Literal["constant", "linear"] = Field("constant", description="linear: clip_ratio falls to 0")
    dual_clip: float | None = Field(
        None, gt=1, description="dual clip: cap of the probability ratio for negative advantages; null: off"
    )
    ppo_epochs: int = Field(5, gt=0, description="passes over a rollout")
    critic_lr: float | None = Field(None, gt=0, description="learning rate of the critic; null: policy_lr")
    critic_warmup_updates: int = Field(0, ge=0, description="first updates in which only the critic learns")
    gamma: float = Field(0.97, ge=0, le=1, description="discount per env step")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="lambda of generalised advantage estimation")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    value_loss_coef: float = Field(0.5, ge=0, description="weight of the critic's loss")
    value_clip: float | None = Field(None, gt=0, description="limit of the value's change in an update; null: off")
    normalize_value: bool = Field(
        False, description="the critic starts at the mean return and learns normalised returns (PopArt)"
    )
    normalize_advantage: bool = Field(True, description="normalise advantages of a minibatch to mean 0 and std 1")

    @field_validator("proximal")
    @classmethod
    def _known_in_time(cls, proximal: str, info: ValidationInfo) -> str:
        if proximal == "interpolated" and info.data.get("correction") == "vtrace":
            raise ValueError("vtrace needs exact weights before the first gradient step; use correction=decoupled")
        return proximal


class GRPOConfig(AlgorithmConfig):
    """Group-relative PPO: compares episodes with the same start state; needs no critic."""

    clip_low: float = Field(0.2, gt=0, lt=1, description="how far the probability ratio may fall below 1")
    clip_high: float = Field(0.28, gt=0, description="how far the probability ratio may rise above 1")
    epochs: int = Field(5, gt=0, description="passes over the episodes of a rollout")
    advantage_eps: float = Field(1e-4, gt=0, description="added to a group's standard deviation of rewards")
