"""The `policy` section of a pretrained model behind `VLAModelInterface`. Torch-free."""

from typing import Literal

from pydantic import Field, field_validator

from sparring.policies.configs import CriticConfig, DenoisingConfig, LoraConfig


class VLAConfig(DenoisingConfig, CriticConfig, LoraConfig):
    """A vision-language-action model of your own, from a checkpoint."""

    name: str = Field("vla", description="which policy: actor_critic, flow, vla, or your.module:Class")
    model_path: str | None = Field(
        None, description="weights: .safetensors, its index, .pth, or a Hugging Face folder; null: fresh ones"
    )
    model_class: str | None = Field(None, description="package.module:Class, or package.module.Class")
    model_settings: dict = Field({}, description="what the class is constructed with; `model_config` in documents")
    strict: bool = Field(True, description="the checkpoint has every weight of the model, and no other")
    action_dim: int | None = Field(
        None, gt=0, description="numbers the model gives a decision, checked; null: what env and action_steps take"
    )
    observation_keys: dict = Field(
        {}, description="the model's key: ours, or a list of ours to stack, e.g. {rgb: [image/head]}; null: not shown"
    )
    images: Literal["float", "uint8"] = Field("float", description="how rgb is told: 0..1, or 0..255")
    tokenizer: str = Field(
        "bytes", description="of the instruction: bytes, text (as it is), checkpoint (model_path's own), or a folder"
    )
    max_tokens: int | None = Field(None, gt=0, description="instructions are padded to so many; null: to the longest")
    normalize_observations: bool = Field(False, description="proprio by its running mean/std, or the demonstrations'")
    normalize_actions: bool = Field(False, description="the model thinks in actions scaled as the demonstrations' are")
    draws: Literal["rows", "batch"] = Field(
        "rows", description="a model without sample(): robots draw one by one, or together (fast, but less repeatable)"
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="of the model's arithmetic; scores are fp32 or finer"
    )
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="frozen weights are kept in; those that learn are fp32")
    device_map: dict = Field({}, description="pattern of frozen modules: device they stay on, e.g. {vision: cpu}")
    frozen: tuple[str, ...] = Field((), description="patterns of names of weights that do not learn, e.g. [vision]")
    critic_parts: tuple[str, ...] = Field(
        (), description="patterns of names of weights that only get_value reads: they learn with ppo.critic_lr"
    )

    @field_validator("observation_keys")
    @classmethod
    def _names(cls, keys: dict) -> dict:
        for ours in keys.values():
            names = ours if isinstance(ours, (list, tuple)) else [ours]
            if ours is not None and not (names and all(isinstance(name, str) for name in names)):
                raise ValueError(
                    "expected names of observations, e.g. {rgb: [image/head, image/wrist], proprio: state}"
                )
        return keys
