"""The `world_model` section: one config class per kind of world model. Torch-free."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from sparring.policies.configs import LoraConfig

Levels = Annotated[tuple[Annotated[int, Field(ge=2, le=10_000)], ...], Field(min_length=1)]

PRESETS = {
    "tiny": {"channels": 32, "width": 96, "layers": 1, "heads": 4, "members": 3, "memory_channels": 16},
    "small": {"channels": 96, "width": 320, "layers": 4, "heads": 8, "members": 5, "memory_channels": 32},
}


class TokenWorldModelConfig(LoraConfig):
    """Frames as discrete tokens, predicted by an ensemble of transformers with a recurrent memory."""

    name: str = Field("token", description="which world model: token, or your.module:Class")
    preset: Literal["tiny", "small"] = Field(
        "tiny", description="sizes of what is null below; tiny: ~1.3 M parameters, for a CPU; small: ~27 M, for a GPU"
    )
    tokenizer: Literal["context_fsq", "fsq", "vq"] = Field(
        "context_fsq", description="what a token tells: how a patch changes (context_fsq), or how it looks (fsq, vq)"
    )
    levels: Levels = Field((8, 8, 8), description="values of each of the numbers that an fsq token is made of")
    codebook_size: int = Field(512, ge=2, le=10**6, description="tokens that vq chooses from")
    tokenizer_steps: int = Field(
        2000,
        ge=0,
        le=10**7,
        description="gradient steps in which the tokenizer learns, alone; then it stays as it is, for good",
    )
    channels: int | None = Field(
        None, gt=0, le=10_000, description="of the convolutions of the tokenizer; null: the preset's"
    )
    width: int | None = Field(None, gt=0, le=100_000, description="of the transformers; null: the preset's")
    layers: int | None = Field(None, gt=0, le=10_000, description="of each member's transformer; null: the preset's")
    heads: int | None = Field(None, gt=0, le=10_000, description="attention heads; null: the preset's")
    members: int | None = Field(
        None, gt=0, le=100, description="separate transformers of the ensemble; null: the preset's"
    )
    memory_channels: int | None = Field(
        None, gt=0, le=10_000, description="numbers that the memory keeps of each patch; null: the preset's"
    )
    trunk: str | None = Field(
        None,
        validate_default=True,
        description="folder of a native VLA or of transformers' pi0, whose transformer takes the place of the block "
        "that all members share; null: a block of its own; lora_* is for this one",
    )
    remembers: bool = Field(
        True, description="false: every decision is met with an empty memory, to see what a memory is worth"
    )
    language_features: int = Field(
        32, ge=0, le=100_000, description="features of the instruction; 0: the model is not told it"
    )
    camera_dropout: float = Field(
        0.25, ge=0, lt=1, description="share of windows in which the cameras of dropped_cameras are not seen"
    )
    dropped_cameras: tuple[str, ...] = Field(
        ("head",), description="cameras that an explorer does without, so that the memory must at times as well"
    )
    precision: Literal["fp32", "bf16"] = Field("fp32", description="of the networks; losses are always fp32")

    @field_validator("trunk")
    @classmethod
    def _adapted(cls, trunk: str | None, info: ValidationInfo) -> str | None:
        fields = LoraConfig.model_fields.items()
        given = [name for name, field in fields if info.data.get(name, field.default) != field.default]
        if given and trunk is None:
            raise ValueError(
                f"{given[0]}={info.data[given[0]]} is for the transformer of a VLA and there is none; give the folder "
                "of one as world_model.trunk, or leave it out (of a policy it is policy.lora_r)"
            )
        return trunk
