"""The `world_model` section: one config class per kind of world model. Torch-free."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from sparring.policies.configs import LoraConfig

Levels = Annotated[tuple[Annotated[int, Field(ge=2)], ...], Field(min_length=1)]

PRESETS = {
    "tiny": {"channels": 32, "width": 96, "layers": 1, "heads": 4, "members": 3, "memory_channels": 16},
    "small": {"channels": 96, "width": 320, "layers": 4, "heads": 8, "members": 5, "memory_channels": 32},
}


class TokenWorldModelConfig(LoraConfig):
    """Frames as discrete tokens, predicted by an ensemble of transformers with a recurrent memory."""

    name: str = Field("token", description="kind of world model: token, or your.module:Class")
    preset: Literal["tiny", "small"] = Field(
        "tiny", description="values of sizes that are null; tiny: ~1.3 M parameters, for a CPU; small: ~27 M, for a GPU"
    )
    tokenizer: Literal["context_fsq", "fsq", "vq"] = Field(
        "context_fsq", description="a token encodes the change of a patch (context_fsq) or its appearance (fsq, vq)"
    )
    levels: Levels = Field((8, 8, 8), description="number of levels of each dimension of an fsq token")
    codebook_size: int = Field(512, ge=2, description="number of vq tokens")
    tokenizer_steps: int = Field(2000, ge=0, description="gradient steps of the tokenizer alone; then it is frozen")
    channels: int | None = Field(None, gt=0, description="channels of the tokenizer's convolutions; null: the preset's")
    width: int | None = Field(None, gt=0, description="width of the transformers; null: the preset's")
    layers: int | None = Field(None, gt=0, description="layers of each member's transformer; null: the preset's")
    heads: int | None = Field(None, gt=0, description="attention heads; null: the preset's")
    members: int | None = Field(None, gt=0, description="transformers in the ensemble; null: the preset's")
    memory_channels: int | None = Field(None, gt=0, description="memory size per patch; null: the preset's")
    trunk: str | None = Field(
        None,
        validate_default=True,
        description="folder of a native VLA or of transformers' pi0, whose transformer replaces the transformer block "
        "that all ensemble members share; null: a new block; lora_* applies to this transformer",
    )
    remembers: bool = Field(True, description="false: empty the memory before each decision, as an ablation")
    language_features: int = Field(32, ge=0, description="features of the instruction; 0: it is not an input")
    camera_dropout: float = Field(0.25, ge=0, lt=1, description="share of windows in which dropped_cameras are masked")
    dropped_cameras: tuple[str, ...] = Field(
        ("head",), description="cameras that camera_dropout masks, because an explorer lacks them"
    )
    precision: Literal["fp32", "bf16"] = Field("fp32", description="precision of the networks; losses are always fp32")

    @field_validator("trunk")
    @classmethod
    def _adapted(cls, trunk: str | None, info: ValidationInfo) -> str | None:
        fields = LoraConfig.model_fields.items()
        given = [name for name, field in fields if info.data.get(name, field.default) != field.default]
        if given and trunk is None:
            why = f"{given[0]}={info.data[given[0]]} applies to the transformer of a VLA, and world_model.trunk is null"
            raise ValueError(f"{why}; set world_model.trunk to the folder of a VLA, or remove the setting")
        return trunk
