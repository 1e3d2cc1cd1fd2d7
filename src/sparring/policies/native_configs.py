"""The `policy` section of the native VLA. Torch-free."""

from typing import Literal

from pydantic import Field

from sparring.lora_configs import LoraConfig
from sparring.policies.configs import CriticConfig, DenoisingConfig


class NativeVLAConfig(DenoisingConfig, CriticConfig, LoraConfig):
    """A vision-language-action model of pi0's shape: a prefix of images and words, and an expert that denoises."""

    name: str = Field("native_vla", description="which policy: native_vla, flow, or your.module:Class")
    preset: Literal["tiny", "small", "pi0"] = Field(
        "tiny",
        description="sizes of what is null below; tiny: 1 M parameters, for a CPU; small: 80 M; pi0: 3.2 B",
    )
    model_path: str | None = Field(
        None, description="folder with weights and their sizes: one saved here, or transformers' pi0; null: fresh"
    )
    tokenizer: str | None = Field(
        None, description="folder with tokenizer.json, or bytes; null: the checkpoint's own, bytes where there is none"
    )
    horizon: int | None = Field(
        None, gt=0, description="steps that are planned; null: a pi0 checkpoint's chunk_size, else rollout.action_steps"
    )
    sampling_steps: int | None = Field(
        None, gt=0, description="denoising steps of a decision; null: a pi0 checkpoint's num_inference_steps, else 4"
    )
    text_tokens: int = Field(256, gt=0, description="tokens that an instruction may have")
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="of the network; what does not learn is kept in it too; densities are fp32 or finer"
    )
    fast: bool | None = Field(
        None, description="act by compiled CUDA graphs; null: on a GPU in bf16; scoring never does"
    )
    frozen: tuple[str, ...] = Field((), description="patterns of the names of weights that do not learn, e.g. vision.*")
    normalize_observations: bool = Field(
        True, description="scale observation/state: by its running mean/std, or as imitate.state_normalization says"
    )
    normalize_actions: bool = Field(True, description="denoise in the space the demonstrations are normalised to")
    memory_size: int = Field(
        0, ge=0, description="numbers that a robot remembers of its episode, told as a token; 0: none"
    )
    image_size: int | None = Field(
        None, gt=0, description="pixels that images of another size are resized to; null: the preset's"
    )
    patch_size: int | None = Field(None, gt=0, description="pixels of a patch, a token each; null: the preset's")
    vision_width: int | None = Field(None, gt=0, description="of the vision encoder; null: the preset's")
    vision_layers: int | None = Field(None, gt=0, description="of the vision encoder; null: the preset's")
    vision_heads: int | None = Field(None, gt=0, description="of the vision encoder; null: the preset's")
    vision_mlp: int | None = Field(None, gt=0, description="width within its MLPs; null: the preset's")
    vocabulary: int | None = Field(None, gt=0, description="tokens that have an embedding; null: the preset's")
    width: int | None = Field(None, gt=0, description="of the transformer over images and words; null: the preset's")
    mlp: int | None = Field(None, gt=0, description="width within its MLPs; null: the preset's")
    layers: int | None = Field(None, gt=0, description="of this transformer and the expert; null: the preset's")
    heads: int | None = Field(None, gt=0, description="attention heads of both; null: the preset's")
    kv_heads: int | None = Field(None, gt=0, description="heads of keys and values, shared; null: the preset's")
    head_dim: int | None = Field(None, gt=0, multiple_of=2, description="numbers of a head; null: the preset's")
    expert_width: int | None = Field(None, gt=0, multiple_of=2, description="of the action expert; null: the preset's")
    expert_mlp: int | None = Field(None, gt=0, description="width within its MLPs; null: the preset's")
    max_state_dim: int | None = Field(None, gt=0, description="what a state is padded to; null: the preset's")
    max_action_dim: int | None = Field(None, gt=0, description="what an action is padded to; null: the preset's")
