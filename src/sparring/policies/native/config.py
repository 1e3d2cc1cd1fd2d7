"""The `policy` section of the native VLA, and the sizes of its presets. Torch-free."""

from dataclasses import dataclass, fields, replace
from typing import Literal

from pydantic import Field

from sparring.errors import UserError
from sparring.policies.configs import CriticConfig, DenoisingConfig, LoraConfig


@dataclass(frozen=True)
class Sizes:
    """All sizes that determine the shapes of the weights; each is a key of the `policy` section."""

    image_size: int
    patch_size: int
    vision_width: int
    vision_layers: int
    vision_heads: int
    vision_mlp: int
    vocabulary: int
    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    expert_width: int
    expert_mlp: int
    max_state_dim: int = 32
    max_action_dim: int = 32
    memory_size: int = 0

    def __post_init__(self):
        for name, size in vars(self).items():
            if type(size) is not int or size < (name != "memory_size"):
                raise UserError(f"policy.{name}={size!r}: expected a whole number above 0")
            if size % 2 and name in ("head_dim", "expert_width"):
                raise UserError(f"policy.{name}={size}: expected an even number")
        for whole, part in (("vision_width", "vision_heads"), ("image_size", "patch_size"), ("heads", "kv_heads")):
            if getattr(self, whole) % getattr(self, part):
                first, second = f"{whole}={getattr(self, whole)}", f"{part}={getattr(self, part)}"
                advice = "make the first a multiple of the second"
                raise UserError(f"policy.{first} cannot be split into policy.{second}; {advice}")


_PRESETS = {  # tiny, small, pi0
    "image_size": (64, 128, 224),
    "patch_size": (16, 16, 14),
    "vision_width": (128, 384, 1152),
    "vision_layers": (2, 12, 27),
    "vision_heads": (4, 6, 16),
    "vision_mlp": (256, 1536, 4304),
    "vocabulary": (258, 258, 257152),
    "width": (128, 512, 2048),
    "mlp": (256, 2048, 16384),
    "layers": (2, 12, 18),
    "heads": (4, 8, 8),
    "kv_heads": (1, 1, 1),
    "head_dim": (32, 64, 256),
    "expert_width": (128, 256, 1024),
    "expert_mlp": (256, 1024, 4096),
    "max_state_dim": (128, 128, 32),
}
PRESETS = {
    preset: Sizes(**{name: sizes[column] for name, sizes in _PRESETS.items()})
    for column, preset in enumerate(("tiny", "small", "pi0"))
}


class NativeVLAConfig(DenoisingConfig, CriticConfig, LoraConfig):
    """A vision-language-action model like pi0: a prefix of images and text, and an action expert that denoises."""

    name: str = Field("native_vla", description="kind: actor_critic, flow, vla, native_vla, pi0 or your.module:Class")
    preset: Literal["tiny", "small", "pi0"] = Field(
        "tiny", description="defaults of the sizes below; tiny: 1 M parameters, for a CPU; small: 80 M; pi0: 3.2 B"
    )
    model_path: str | None = Field(None, description="folder of save_model, or transformers' pi0; null: random weights")
    tokenizer: str | None = Field(None, description="folder with tokenizer.json, or bytes; null: checkpoint's or bytes")
    horizon: int | None = Field(None, gt=0, description="planned steps; null: pi0's chunk_size or rollout.action_steps")
    sampling_steps: int | None = Field(  # type: ignore[assignment]
        None, gt=0, description="denoising steps per decision; null: a pi0 checkpoint's num_inference_steps, else 4"
    )
    text_tokens: int = Field(256, gt=0, description="maximum number of tokens of an instruction")
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="dtype of computations and of frozen weights; log-probs: >= fp32"
    )
    fast: bool | None = Field(None, description="act (not score) with compiled CUDA graphs; null: on a GPU in bf16")
    frozen: tuple[str, ...] = Field((), description="patterns of the names of weights that do not learn, e.g. vision.*")
    normalize_observations: bool = Field(True, description="normalise the state (running or demonstration statistics)")
    normalize_actions: bool = Field(True, description="denoise actions normalised by the demonstrations' statistics")
    memory_size: int = Field(0, ge=0, description="size of the memory of an episode, an extra token; 0: no memory")
    image_size: int | None = Field(None, gt=0, description="images are resized to this side; null: the preset's")
    patch_size: int | None = Field(None, gt=0, description="side of an image patch (one token); null: the preset's")
    vision_width: int | None = Field(None, gt=0, description="width of the vision encoder; null: the preset's")
    vision_layers: int | None = Field(None, gt=0, description="layers of the vision encoder; null: the preset's")
    vision_heads: int | None = Field(None, gt=0, description="attention heads of the vision encoder; null: preset's")
    vision_mlp: int | None = Field(None, gt=0, description="MLP width of the vision encoder; null: the preset's")
    vocabulary: int | None = Field(None, gt=0, description="number of token embeddings; null: the preset's")
    width: int | None = Field(None, gt=0, description="width of the language model; null: the preset's")
    mlp: int | None = Field(None, gt=0, description="MLP width of the language model; null: the preset's")
    layers: int | None = Field(None, gt=0, description="layers of language model and expert; null: the preset's")
    heads: int | None = Field(None, gt=0, description="attention heads of both; null: the preset's")
    kv_heads: int | None = Field(None, gt=0, description="heads of keys and values, shared; null: the preset's")
    head_dim: int | None = Field(None, gt=0, multiple_of=2, description="size of a head; null: the preset's")
    expert_width: int | None = Field(
        None, gt=0, multiple_of=2, description="width of the action expert; null: the preset's"
    )
    expert_mlp: int | None = Field(None, gt=0, description="MLP width of the action expert; null: the preset's")
    max_state_dim: int | None = Field(None, gt=0, description="states are padded to this size; null: the preset's")
    max_action_dim: int | None = Field(None, gt=0, description="actions are padded to this size; null: the preset's")

    def sizes(self, saved: Sizes | None = None) -> Sizes:
        """Sizes of the preset or of `saved` weights. The config may change the preset, and add a memory to both."""
        given = {field.name: getattr(self, field.name) for field in fields(Sizes) if field.name != "memory_size"}
        given = {name: size for name, size in given.items() if size is not None}
        if saved is None:
            return replace(PRESETS[self.preset], memory_size=self.memory_size, **given)
        wrong = {name: size for name, size in given.items() if size != getattr(saved, name)}
        if wrong:
            listed = ", ".join(f"policy.{name}={size} (saved: {getattr(saved, name)})" for name, size in wrong.items())
            advice = "remove the setting"
            raise UserError(f"{listed} does not match the weights in policy.model_path={self.model_path}; {advice}")
        if saved.memory_size not in (0, self.memory_size):
            expected = f"the weights in policy.model_path={self.model_path} need memory_size={saved.memory_size}"
            raise UserError(f"policy.memory_size={self.memory_size}, but {expected}; set that value")
        return replace(saved, memory_size=self.memory_size)
