"""The `ppo` and `grpo` sections. Torch-free."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from sparring.config.section import Section


class AlgorithmConfig(Section):
    """How a policy takes gradient steps; part of every algorithm's section."""

    mini_batch_size: int = Field(512, gt=0, description="decisions per gradient step, on each process")
    micro_batch_size: int | None = Field(
        None, gt=0, description="decisions that fit into memory at once; gradients add up to a minibatch's; null: all"
    )
    policy_lr: float = Field(1e-3, gt=0, description="learning rate of everything but the critic")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="how learning rates fall to 0")
    warmup_updates: int = Field(0, ge=0, description="updates over which learning rates rise from 0")
    max_grad_norm: float = Field(0.5, gt=0, description="gradients are scaled down to this norm")
    target_kl: float | None = Field(None, gt=0, description="ends an update's epochs past this KL; null: off")
    adam_eps: float = Field(1e-5, gt=0, description="Adam's epsilon")
    kl_coef: float = Field(
        0.0, ge=0, description="weight of the KL to the policy as it was when the run began; 0: not even worked out"
    )
    parity_tolerance: float = Field(
        1e-4, gt=0, description="largest drift between acting and scoring, in sigmas, before training is refused"
    )
    correction: Literal["none", "truncated", "decoupled"] = Field(
        "decoupled", description="what makes up for older weights having acted; fresh data is learned from as ever"
    )
    weight_cap: float = Field(
        2.0,
        ge=1,
        description="largest weight of a stale decision: decoupled drops it beyond, truncated cuts; not for vtrace",
    )
    proximal: Literal["exact", "interpolated"] = Field(
        "exact", description="log-probs as an update begins: scored once more where stale, or guessed from versions"
    )


class PPOConfig(AlgorithmConfig):
    """Clipped PPO."""

    correction: Literal["none", "truncated", "decoupled", "vtrace"] = Field(  # type: ignore[assignment]
        "vtrace", description="what makes up for older weights having acted; fresh data is learned from as ever"
    )
    rho_bar: float = Field(1.0, ge=1, description="of vtrace: largest weight of a stale decision")
    c_bar: float = Field(1.0, gt=0, description="of vtrace: most that what follows a stale decision counts for it")
    clip_ratio: float = Field(0.2, gt=0, lt=1, description="how far the probability ratio may leave 1")
    clip_schedule: Literal["constant", "linear"] = Field("constant", description="linear: clip_ratio falls to 0")
    dual_clip: float | None = Field(
        None, gt=1, description="most that a bad decision's ratio counts, however likely it became; null: off"
    )
    ppo_epochs: int = Field(5, gt=0, description="passes over a rollout")
    critic_lr: float | None = Field(None, gt=0, description="learning rate of the critic; null: policy_lr")
    critic_warmup_updates: int = Field(0, ge=0, description="first updates in which the critic alone learns")
    gamma: float = Field(0.97, ge=0, le=1, description="discount per env step")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="lambda of generalised advantage estimation")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    value_loss_coef: float = Field(0.5, ge=0, description="weight of the critic's loss")
    value_clip: float | None = Field(None, gt=0, description="clips the critic's change per update; null: off")
    normalize_value: bool = Field(
        False, description="the critic begins at the returns' level and learns in units of their spread"
    )
    normalize_advantage: bool = Field(True, description="advantages of a minibatch get mean 0 and std 1")

    @field_validator("proximal")
    @classmethod
    def _known_in_time(cls, proximal: str, info: ValidationInfo) -> str:
        if proximal == "interpolated" and info.data.get("correction") == "vtrace":
            raise ValueError("vtrace needs its weights before the first gradient step; set correction=decoupled, too")
        return proximal


class GRPOConfig(AlgorithmConfig):
    """Group-relative PPO: episodes that began alike are compared with each other, and no critic is needed."""

    clip_low: float = Field(0.2, gt=0, lt=1, description="how far the probability ratio may fall below 1")
    clip_high: float = Field(0.28, gt=0, description="how far the probability ratio may rise above 1")
    epochs: int = Field(5, gt=0, description="passes over the episodes of a rollout")
    advantage_eps: float = Field(1e-4, gt=0, description="added to a group's standard deviation of rewards")
