"""The `policy` section: one config class per kind of policy, but for those with a folder of their own. Torch-free."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator

from sparring.config.section import Section

PositiveInt = Annotated[int, Field(gt=0, le=100_000)]
# settings of a flow policy that one method reads, and all that only some methods read
OF_ONE_METHOD = {"denoising_mdp": ("kernel", "denoising_steps", "denoising_discount"), "fpo": ("loss_samples",)}
OF_A_METHOD = (*sum(OF_ONE_METHOD.values(), ()), "noise_level", "noise_range")


class LoraConfig(Section):
    """Low-rank adapters beside weights that stay as they are; part of the section of everything pretrained."""

    lora_r: int = Field(0, ge=0, description="rank of the LoRA adapters; 0: none, all weights learn")
    lora_alpha: float = Field(16.0, gt=0, description="adapters count lora_alpha / lora_r times")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="before adapters; of a policy in imitation, never in RL")
    lora_targets: tuple[str, ...] = Field(
        (), description="layers with adapters: names, ends of names, globs or regexes; []: all linear layers"
    )
    modules_to_save: tuple[str, ...] = Field(
        (), description="parts, or weights alone, that learn in full beside the adapters; named as lora_targets are"
    )

    @classmethod
    def set_without_rank(cls, values: Mapping) -> list[str]:
        defaults = {name: field.default for name, field in LoraConfig.model_fields.items() if name != "lora_r"}
        return [name for name, default in defaults.items() if values.get(name, default) != default]


class EncoderConfig(Section):
    """How observations become features; part of every policy's section."""

    channels: tuple[PositiveInt, ...] = Field((32, 64, 64), description="channels of the image encoder's convolutions")
    image_encoder: Literal["flat", "keypoints"] = Field(
        "flat", description="flat: a CNN's last map as it is; keypoints: where channels see something, for few demos"
    )
    image_features: int = Field(256, gt=0, description="features the image encoder gives to actor and critic")
    use_images: bool = Field(True, description="read the cameras' images; false: points, state and language only")
    point_channels: tuple[PositiveInt, ...] = Field((64, 128), description="widths of the MLP each point goes through")
    point_features: int = Field(128, gt=0, description="features the point encoder gives, where the env shows points")
    point_frame: Literal["world", "gripper"] = Field(
        "world", description="where points are told from; gripper: from the hand's position (from each, with two arms)"
    )
    language_features: int = Field(0, ge=0, description="features of the instruction, read byte by byte; 0: not read")
    dropout: float = Field(0.0, ge=0, lt=1, description="in the networks, while imitating only")
    freeze_encoder: bool = Field(False, description="image, point and language encoders keep the weights they have")
    normalize_observations: bool = Field(True, description="scale state by running mean/std, or imitate's statistics")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="of encoder and actor; densities are fp32 or finer")


class CriticConfig(Section):
    """The value network; part of every policy's section."""

    hidden: tuple[PositiveInt, ...] = Field((64, 64), description="widths of the hidden layers of actor and critic")
    activation: Literal["tanh", "relu", "elu", "silu"] = Field("tanh", description="between hidden layers")


class ActorCriticConfig(EncoderConfig, CriticConfig):
    """MLP actor-critic on state, with a CNN in front where the env has cameras."""

    name: str = Field("actor_critic", description="which policy: actor_critic, flow, or your.module:Class")
    distribution: Literal["auto", "gaussian", "squashed", "gsde", "discrete", "tokens"] = Field(
        "auto", description="auto: discrete if the env's actions are, else gaussian; gsde: smooth noise; tokens: bins"
    )
    bins: int = Field(64, ge=2, description="tokens: how many choices each action dim has, evenly over [-1, 1]")
    sde_sample_freq: int = Field(4, gt=0, description="decisions over which gsde keeps its exploration direction")
    init_std: float = Field(0.6, gt=0, le=5, description="standard deviation of a fresh gaussian policy")
    normalize_actions: bool = Field(False, description="gaussian, gsde: think in actions scaled as demonstrations are")


class DenoisingConfig(Section):
    """How a policy that denoises draws its chunks, and scores them; part of the section of every such policy."""

    horizon: int | None = Field(None, gt=0, description="planned steps of a chunk; null: rollout.action_steps")
    sampling_steps: int = Field(4, gt=0, description="denoising steps of a decision, in training and evaluation alike")
    method: Literal["flow_sde", "flow_sde_one_step", "flow_noise", "denoising_mdp", "fpo"] = Field(
        "flow_sde",
        description="how noise is drawn and scored in RL; flow_sde_one_step: one drawn step, K times cheaper; "
        "fpo: only the start is random, and the flow-matching loss is the score",
    )
    noise_level: float = Field(0.5, gt=0, description="eta where noise is not learned: how much a denoising step adds")
    noise_range: tuple[float, float] = Field((0.08, 0.16), description="least and most std where noise is learned")
    kernel: Literal["sde", "noise"] = Field("sde", description="of denoising_mdp: the noise of flow_sde or flow_noise")
    denoising_steps: int | None = Field(
        None, gt=0, description="of denoising_mdp: the last so many steps are random and scored; null: all"
    )
    denoising_discount: float = Field(0.99, gt=0, le=1, description="denoising_mdp: advantage per step before the last")
    loss_samples: int = Field(8, gt=0, description="of fpo: times and noises that a decision's loss is taken at")
    reduction: Literal["sum", "mean"] = Field(
        "sum", description="of log-probs over steps, positions and dims; mean widens what clip_ratio allows"
    )


class FlowConfig(DenoisingConfig, EncoderConfig, CriticConfig):
    """Action chunks by flow matching: a transformer denoises them in a few steps."""

    name: str = Field("flow", description="which policy: actor_critic, flow, or your.module:Class")
    width: int = Field(128, gt=0, description="of the action transformer")
    layers: int = Field(2, gt=0, description="of the action transformer")
    heads: int = Field(4, gt=0, description="attention heads of the action transformer")
    normalize_actions: bool = Field(True, description="denoise in the space the demonstrations are normalised to")
    consistency: float = Field(
        0.0, ge=0, description="weight of the consistency term in imitation, so that 1-2 sampling steps suffice; 0: off"
    )
    target_decay: float = Field(0.999, ge=0, lt=1, description="of the slow network that the consistency term aims at")


class PI0PolicyConfig(DenoisingConfig, CriticConfig, LoraConfig):
    """pi0 through transformers: a vision-language model, and an action expert that denoises chunks by flow matching."""

    name: str = Field("pi0", description="which policy: actor_critic, flow, pi0, or your.module:Class")
    model_path: str | None = Field(None, description="needed: folder of a pi0, by transformers' save_pretrained")
    tokenizer: str | None = Field(
        None, description="folder with a tokenizer; null: the checkpoint's own; bytes: byte by byte, for a fresh model"
    )
    cameras: tuple[str, ...] = Field((), description="which cameras it is shown, in the checkpoint's order; []: all")
    horizon: int | None = Field(None, gt=0, description="steps that are planned: the checkpoint's chunk_size, or null")
    sampling_steps: int | None = Field(  # type: ignore[assignment]
        None, gt=0, description="denoising steps of a decision; null: the checkpoint's num_inference_steps"
    )
    frozen: tuple[str, ...] = Field((), description="parts that keep their weights, named as lora_targets; no LoRA")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="it computes in; densities are fp32 or finer")
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="of weights that do not learn; those that do are fp32")
    attention: Literal["eager", "sdpa"] = Field("eager", description="transformers' way to compute attention")
    normalize_observations: bool = Field(True, description="scale state by running mean/std, or imitate's statistics")
    normalize_actions: bool = Field(True, description="denoise in the space the demonstrations are normalised to")


class VLAConfig(DenoisingConfig, CriticConfig, LoraConfig):
    """A vision-language-action model of your own, from a checkpoint."""

    name: str = Field("vla", description="which policy: actor_critic, flow, vla, or your.module:Class")
    model_path: str | None = Field(None, description=".safetensors, its index, .pth or Hugging Face folder; null: new")
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
    tokenizer: str = Field("bytes", description="bytes, text (as it is), checkpoint (model_path's own), or a folder")
    max_tokens: int | None = Field(None, gt=0, description="instructions are padded to so many; null: to the longest")
    normalize_observations: bool = Field(False, description="proprio by its running mean/std, or the demonstrations'")
    normalize_actions: bool = Field(False, description="the model thinks in actions scaled as the demonstrations' are")
    draws: Literal["rows", "batch"] = Field(
        "rows", description="a model without sample(): robots draw one by one, or together (fast, but less repeatable)"
    )
    precision: Literal["fp32", "bf16"] = Field("fp32", description="of the model's arithmetic; scores: fp32 or finer")
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
                raise ValueError("expected names of observations, e.g. {rgb: [image/head], proprio: state}")
        return keys
