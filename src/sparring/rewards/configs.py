"""The `rewards` section: weights of the reward terms. Torch-free."""

import math
from typing import Any, Literal

from pydantic import Field, field_validator

from sparring.config.section import Section
from sparring.config.text import flatten, value_text


class RewardsConfig(Section):
    """Weights of the explorer's reward terms; 0 disables a term."""

    name: Literal["default", "original"] = Field(
        "default", description="preset of weights; original: those of F1-VLA's documents"
    )
    # a weight of 1 leads some explorers away from objects: docs/log.md
    memory_divergence: float = Field(
        0.3,
        ge=0,
        description="decrease of the distance between two memories of the world model: one computed from the "
        "explorer's cameras, one from all cameras",
    )
    memory_change: float = Field(0.0, ge=0, description="change of the world model's memory")
    prediction_error: float = Field(0.0, ge=0, description="cross-entropy of the true next frame")
    prediction_entropy: float = Field(0.0, ge=0, description="entropy of the prediction")
    disagreement: float = Field(1.0, ge=0, description="disagreement between the world model's ensemble members")
    latent_surprise: float = Field(0.0, ge=0, description="prediction error beyond the predicted entropy")
    learning_progress: float = Field(
        0.0, ge=0, description="decrease of the prediction error over training; needs a world model that learns"
    )
    rnd: float = Field(0.0, ge=0, description="novelty of the next frame (random network distillation)")
    task_success: float = Field(0.0, ge=0, description="1 for an episode that ends in success")
    task_reward: float = Field(0.0, ge=0, description="the env's own reward; in finetune with rewards.terms, default 1")
    terms: dict = Field(
        default_factory=dict,
        description="user-defined terms in finetune: your.module:function -> weight, added to the env's reward",
    )
    divergence: Literal["potential", "original"] = Field(
        "potential",
        description="memory_divergence from the distances d before and d' after a decision; "
        "potential: d - discount * d'; original: -(d' - d) - 0.07 d",
    )
    divergence_discount: float = Field(0.99, gt=0, le=1, description="memory_divergence: discount per decision")
    clip: float = Field(5.0, gt=0, description="limit of a normalised term, in standard deviations")

    @field_validator("terms", mode="before")
    @classmethod
    def _weights_by_path(cls, value: Any) -> Any:
        """Dots in a path are read as sections: {"my": {"module:term": 1}} -> {"my.module:term": 1.0}."""
        weights = flatten(value) if isinstance(value, dict) else {}
        for path, weight in weights.items():
            if ":" not in path:
                raise ValueError(f"'{path}' is not an import path; expected your.module:function")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ValueError(f"{path}={value_text(weight)}: expected a number, the weight of this term")
        return weights if isinstance(value, dict) else value


def _meaning(field: str) -> str | None:
    return RewardsConfig.model_fields[field].description


class OriginalRewardsConfig(RewardsConfig):
    """Weights of the explorer's reward terms as in F1-VLA's documents; 0 disables a term."""

    name: Literal["default", "original"] = Field("original", description=_meaning("name"))
    memory_divergence: float = Field(1.0, ge=0, description=_meaning("memory_divergence"))
    prediction_error: float = Field(1.0, ge=0, description=_meaning("prediction_error"))
    disagreement: float = Field(0.0, ge=0, description=_meaning("disagreement"))
    divergence: Literal["potential", "original"] = Field("original", description=_meaning("divergence"))
