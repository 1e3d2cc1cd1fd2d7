"""Low-rank adapters as part of a `policy` section. Torch-free."""

from pydantic import Field

from sparring.config import Section


class LoraConfig(Section):
    """Small matrices beside frozen weights (LoRA); part of the section of every policy with a pretrained trunk."""

    lora_r: int = Field(0, ge=0, description="rank of the adapters that learn in place of the weights; 0: none")
    lora_alpha: float = Field(16, gt=0, description="adapters count lora_alpha / lora_r")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="before the adapters, while imitating only")
    lora_targets: tuple[str, ...] = Field(
        (), description="patterns of names of modules that get adapters; []: all linear layers of the model"
    )
    modules_to_save: tuple[str, ...] = Field((), description="modules that learn in full beside the adapters")
