"""LoRA's part of the `policy` and `world_model` sections. Torch-free."""

from collections.abc import Mapping

from pydantic import Field

from sparring.config import Section


class LoraConfig(Section):
    """Low-rank adapters beside weights that stay as they are; part of the section of everything pretrained."""

    lora_r: int = Field(0, ge=0, description="rank of the LoRA adapters; 0: none, all weights learn")
    lora_alpha: float = Field(16.0, gt=0, description="adapters count lora_alpha / lora_r times")
    lora_dropout: float = Field(
        0.0, ge=0, lt=1, description="before the adapters; of a policy while it imitates, never in RL"
    )
    lora_targets: tuple[str, ...] = Field(
        (), description="layers with adapters: names, ends of names, globs or regexes; []: all linear layers"
    )
    modules_to_save: tuple[str, ...] = Field(
        (), description="parts, or weights alone, that learn in full beside the adapters; named as lora_targets are"
    )


def set_without_lora(values: Mapping) -> list[str]:
    """Which settings of a section would not be read, because it has no `lora_r`."""
    usual = {name: field.default for name, field in LoraConfig.model_fields.items() if name != "lora_r"}
    return [name for name, default in usual.items() if values.get(name, default) != default]
