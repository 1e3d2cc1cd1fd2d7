"""The `policy` section of pi0. Torch-free."""

from typing import Literal

from pydantic import Field

from sparring.lora_configs import LoraConfig
from sparring.policies.configs import CriticConfig, DenoisingConfig


class PI0PolicyConfig(DenoisingConfig, CriticConfig, LoraConfig):
    """pi0 through transformers: a vision-language model, and an action expert that denoises chunks by flow matching."""

    name: str = Field("pi0", description="which policy: actor_critic, flow, pi0, or your.module:Class")
    model_path: str | None = Field(
        None, description="folder with a pi0 checkpoint, as transformers' save_pretrained writes it; is needed"
    )
    tokenizer: str | None = Field(
        None, description="folder with a tokenizer; null: the checkpoint's own; bytes: byte by byte, for a fresh model"
    )
    cameras: tuple[str, ...] = Field((), description="which cameras it is shown, in the checkpoint's order; []: all")
    horizon: int | None = Field(None, gt=0, description="steps that are planned: the checkpoint's chunk_size, or null")
    sampling_steps: int | None = Field(
        None, gt=0, description="denoising steps of a decision; null: the checkpoint's num_inference_steps"
    )
    frozen: tuple[str, ...] = Field(
        (), description="parts that keep their weights: names, ends of names, globs or regexes; without LoRA"
    )
    precision: Literal["fp32", "bf16"] = Field("fp32", description="it computes in; densities are fp32 or finer")
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="of weights that do not learn; those that do are fp32")
    attention: Literal["eager", "sdpa"] = Field("eager", description="transformers' way to compute attention")
    normalize_observations: bool = Field(
        True, description="scale observation/state: by its running mean/std, or as imitate.state_normalization says"
    )
    normalize_actions: bool = Field(True, description="denoise in the space the demonstrations are normalised to")
