"""The `rewards` section: what an explorer is rewarded for. Torch-free."""

import math
from typing import Any, Literal

from pydantic import Field, field_validator

from sparring.config.section import Section
from sparring.config.text import flatten, value_text


class RewardsConfig(Section):
    """What an explorer is paid for: a weight per term, 0 leaves it out."""

    name: Literal["default", "original"] = Field(
        "default", description="whose weights; original: those of the documents this system comes from"
    )
    # at 1 it leads some explorers away from things: docs/log.md
    memory_divergence: float = Field(
        0.3, ge=0, description="bringing what the explorer's cameras let it know to what all cameras let it know"
    )
    memory_change: float = Field(0.0, ge=0, description="changing the world model's memory")
    prediction_error: float = Field(0.0, ge=0, description="showing the world model what it did not foretell")
    prediction_entropy: float = Field(0.0, ge=0, description="going where the world model is unsure")
    disagreement: float = Field(1.0, ge=0, description="going where the members of the world model disagree")
    latent_surprise: float = Field(0.0, ge=0, description="surprise beyond what was foretold to be random")
    learning_progress: float = Field(
        0.0, ge=0, description="going where the world model errs less than it did; needs one that learns (adversarial)"
    )
    rnd: float = Field(0.0, ge=0, description="showing what was seen seldom (random network distillation)")
    task_success: float = Field(0.0, ge=0, description="ending an episode with the env's task done")
    task_reward: float = Field(0.0, ge=0, description="the env's own reward; in finetune 1 unless set, beside terms")
    terms: dict = Field(
        default_factory=dict,
        description="of your own, in finetune: your.module:function -> its weight beside the env's own reward",
    )
    divergence: Literal["potential", "original"] = Field(
        "potential", description="of memory_divergence: d - discount * d', or the original -(d' - d) - 0.07 d"
    )
    divergence_discount: float = Field(0.99, gt=0, le=1, description="of memory_divergence's potential, per decision")
    clip: float = Field(5.0, gt=0, description="most that a term counts, normalised by its running mean and deviation")

    @field_validator("terms", mode="before")
    @classmethod
    def _weights_by_path(cls, value: Any) -> Any:
        """Dots in a path are read as sections: {"my": {"module:term": 1}} -> {"my.module:term": 1.0}."""
        weights = flatten(value) if isinstance(value, dict) else {}
        for path, weight in weights.items():
            if ":" not in path:
                raise ValueError(f"'{path}' is no import path; expected your.module:function")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ValueError(f"{path}={value_text(weight)}: expected a number, the weight of this term")
        return weights if isinstance(value, dict) else value


def _meaning(field: str) -> str | None:
    return RewardsConfig.model_fields[field].description


class OriginalRewardsConfig(RewardsConfig):
    """What an explorer is paid for, as in the documents this system comes from: a weight per term, 0 leaves it out."""

    name: Literal["default", "original"] = Field("original", description=_meaning("name"))
    memory_divergence: float = Field(1.0, ge=0, description=_meaning("memory_divergence"))
    prediction_error: float = Field(1.0, ge=0, description=_meaning("prediction_error"))
    disagreement: float = Field(0.0, ge=0, description=_meaning("disagreement"))
    divergence: Literal["potential", "original"] = Field("original", description=_meaning("divergence"))
