"""LoRA settings, part of the section of every policy with a large pretrained network. Torch-free."""

from pydantic import Field

from sparring.config import Section


class LoraConfig(Section):
    """Low-rank adapters: the network stays as it is, and small matrices beside its layers learn."""

    lora_r: int = Field(0, ge=0, description="rank of the adapters; 0: none, the network itself learns")
    lora_alpha: float = Field(16, gt=0, description="adapters count lora_alpha / lora_r")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="before the adapters, while imitating only")
    lora_targets: tuple[str, ...] = Field(
        (), description="patterns of the names of layers that get adapters; (): all linear layers"
    )
    modules_to_save: tuple[str, ...] = Field(
        (), description="patterns of the names of layers that learn in full, beside the adapters"
    )
