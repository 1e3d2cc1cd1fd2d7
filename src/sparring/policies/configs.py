"""The `policy` section: one config class per kind of policy; native_vla has its own in native/config.py. Torch-free."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator

from sparring.config.section import Section

PositiveInt = Annotated[int, Field(gt=0, le=100_000)]
# settings of denoising policies that only one policy.method reads, and all that only some methods read
OF_ONE_METHOD = {"denoising_mdp": ("kernel", "denoising_steps", "denoising_discount"), "fpo": ("loss_samples",)}
OF_A_METHOD = (*sum(OF_ONE_METHOD.values(), ()), "noise_level", "noise_range")


class LoraConfig(Section):
    """Low-rank adapters added to frozen weights; part of the section of every pretrained model."""

    lora_r: int = Field(0, ge=0, description="rank of the LoRA adapters; 0: no adapters, all weights learn")
    lora_alpha: float = Field(16.0, gt=0, description="the output of adapters is scaled by lora_alpha / lora_r")
    lora_dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout before adapters; for a policy in imitation only, never in RL"
    )
    lora_targets: tuple[str, ...] = Field(
        (), description="layers that get adapters: names, ends of names, globs or regexes; []: all linear layers"
    )
    modules_to_save: tuple[str, ...] = Field(
        (), description="modules or weights that learn in full, in addition to adapters; patterns as in lora_targets"
    )

    @classmethod
    def set_without_rank(cls, values: Mapping) -> list[str]:
        defaults = {name: field.default for name, field in LoraConfig.model_fields.items() if name != "lora_r"}
        return [name for name, default in defaults.items() if values.get(name, default) != default]


class EncoderConfig(Section):
    """Encoders of observations; part of the section of actor_critic and flow."""

    channels: tuple[PositiveInt, ...] = Field((32, 64, 64), description="channels of the image encoder's convolutions")
    image_encoder: Literal["flat", "keypoints"] = Field(
        "flat", description="flat: a CNN with a flattened map; keypoints: spatial softmax, for few demonstrations"
    )
    image_features: int = Field(256, gt=0, description="output features of the image encoder")
    use_images: bool = Field(True, description="read camera images; false: points, state and language only")
    point_channels: tuple[PositiveInt, ...] = Field((64, 128), description="widths of the MLP applied to each point")
    point_features: int = Field(128, gt=0, description="output features of the point encoder, if the env has points")
    point_frame: Literal["world", "gripper"] = Field(
        "world", description="origin of the points: the world's, or the gripper's position (two arms: each gripper's)"
    )
    language_features: int = Field(0, ge=0, description="features of the instruction's bytes; 0: instructions not read")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of the networks, in imitation only")
    freeze_encoder: bool = Field(False, description="do not train the image, point and language encoders")
    normalize_observations: bool = Field(True, description="normalise the state (running or demonstration statistics)")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="dtype of encoder and actor; log-probs: >= fp32")


class CriticConfig(Section):
    """The value network; part of every policy's section."""

    hidden: tuple[PositiveInt, ...] = Field((64, 64), description="widths of the hidden layers of actor and critic")
    activation: Literal["tanh", "relu", "elu", "silu"] = Field("tanh", description="activation of hidden layers")


class ActorCriticConfig(EncoderConfig, CriticConfig):
    """MLP actor-critic on state, and on features of images, points and instructions if the env has them."""

    name: str = Field("actor_critic", description="kind: actor_critic, flow, vla, native_vla, pi0 or your.module:Class")
    distribution: Literal["auto", "gaussian", "squashed", "gsde", "discrete", "tokens"] = Field(
        "auto", description="auto: discrete if the env's actions are, else gaussian; gsde: smooth noise; tokens: bins"
    )
    bins: int = Field(64, ge=2, description="tokens: number of bins per action dim, evenly spaced over [-1, 1]")
    sde_sample_freq: int = Field(
        4, gt=0, description="gsde: number of decisions for which a robot keeps its noise matrix"
    )
    init_std: float = Field(0.6, gt=0, le=5, description="gaussian, squashed, gsde: initial standard deviation")
    normalize_actions: bool = Field(False, description="gaussian, gsde: actions normalised by demonstrations")


class DenoisingConfig(Section):
    """How a denoising policy samples and scores chunks; part of the section of every such policy."""

    horizon: int | None = Field(None, gt=0, description="planned steps of a chunk; null: rollout.action_steps")
    sampling_steps: int = Field(4, gt=0, description="denoising steps per decision, in training and evaluation")
    method: Literal["flow_sde", "flow_sde_one_step", "flow_noise", "denoising_mdp", "fpo"] = Field(
        "flow_sde",
        description="how RL samples and scores actions; flow_sde_one_step: one random step per decision, so updates "
        "are cheaper; fpo: only the initial noise is random, and the flow-matching loss replaces the log-prob",
    )
    noise_level: float = Field(0.5, gt=0, description="eta: scale of the noise of a step, if it is not learned")
    noise_range: tuple[float, float] = Field((0.08, 0.16), description="smallest and largest std if noise is learned")
    kernel: Literal["sde", "noise"] = Field("sde", description="denoising_mdp: noise as in flow_sde or flow_noise")
    denoising_steps: int | None = Field(
        None, gt=0, description="denoising_mdp: number of last steps that are random and scored; null: all"
    )
    denoising_discount: float = Field(
        0.99, gt=0, le=1, description="denoising_mdp: discount of advantages per denoising step before the last"
    )
    loss_samples: int = Field(8, gt=0, description="fpo: samples of time and noise in a decision's loss")
    reduction: Literal["sum", "mean"] = Field(
        "sum", description="sum or mean of log-probs over steps, positions and dims; mean allows larger updates"
    )


class FlowConfig(DenoisingConfig, EncoderConfig, CriticConfig):
    """Action chunks by flow matching: a transformer denoises them in a few steps."""

    name: str = Field("flow", description="kind: actor_critic, flow, vla, native_vla, pi0 or your.module:Class")
    width: int = Field(128, gt=0, description="width of the action transformer")
    layers: int = Field(2, gt=0, description="layers of the action transformer")
    heads: int = Field(4, gt=0, description="attention heads of the action transformer")
    normalize_actions: bool = Field(True, description="denoise actions normalised by the demonstrations' statistics")
    consistency: float = Field(
        0.0, ge=0, description="weight of the consistency term in imitation, so that 1-2 sampling steps suffice; 0: off"
    )
    target_decay: float = Field(0.999, ge=0, lt=1, description="EMA decay of the consistency term's target network")


class PI0PolicyConfig(DenoisingConfig, CriticConfig, LoraConfig):
    """pi0 through transformers: a vision-language model, and an action expert that denoises chunks by flow matching."""

    name: str = Field("pi0", description="kind: actor_critic, flow, vla, native_vla, pi0 or your.module:Class")
    model_path: str | None = Field(None, description="required: folder of a pi0 saved by transformers' save_pretrained")
    tokenizer: str | None = Field(
        None, description="folder with a tokenizer; null: the checkpoint's; bytes: a token per byte (untrained models)"
    )
    cameras: tuple[str, ...] = Field((), description="cameras that it reads, in the checkpoint's order; []: all")
    horizon: int | None = Field(None, gt=0, description="planned steps: the checkpoint's chunk_size, or null")
    sampling_steps: int | None = Field(  # type: ignore[assignment]
        None, gt=0, description="denoising steps per decision; null: the checkpoint's num_inference_steps"
    )
    frozen: tuple[str, ...] = Field((), description="frozen weights: patterns as in lora_targets; not with LoRA")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="dtype of computations; log-probs: >= fp32")
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype of frozen weights; trained weights are fp32")
    attention: Literal["eager", "sdpa"] = Field("eager", description="transformers' attention implementation")
    normalize_observations: bool = Field(True, description="normalise the state (running or demonstration statistics)")
    normalize_actions: bool = Field(True, description="denoise actions normalised by the demonstrations' statistics")


class VLAConfig(DenoisingConfig, CriticConfig, LoraConfig):
    """A custom vision-language-action model, from a checkpoint."""

    name: str = Field("vla", description="kind: actor_critic, flow, vla, native_vla, pi0 or your.module:Class")
    model_path: str | None = Field(
        None, description="weights: .safetensors, its index, .pth, or a Hugging Face folder; null: random weights"
    )
    model_class: str | None = Field(None, description="package.module:Class, or package.module.Class")
    model_settings: dict = Field({}, description="constructor arguments of the class; alias: policy.model_config")
    strict: bool = Field(True, description="require every weight of the model in the checkpoint, and no other")
    action_dim: int | None = Field(
        None, gt=0, description="expected size of the model's output; null: action_steps times the env's action size"
    )
    observation_keys: dict = Field(
        {}, description="model key: observation, or a list of them to stack, e.g. {rgb: [image/head]}; null: left out"
    )
    images: Literal["float", "uint8"] = Field("float", description="values of rgb: 0..1 (float), or 0..255 (uint8)")
    tokenizer: str = Field("bytes", description="bytes, text (strings), checkpoint (that of model_path), or a folder")
    max_tokens: int | None = Field(None, gt=0, description="instructions are padded to this length; null: the longest")
    normalize_observations: bool = Field(False, description="normalise the state (running or demonstration statistics)")
    normalize_actions: bool = Field(False, description="the model predicts actions normalised by demonstrations")
    draws: Literal["rows", "batch"] = Field(
        "rows",
        description="for models without sample(): one forward pass per robot (rows; reproducible for any batch), or "
        "one for all robots (batch; faster, reproducible for the same batch only)",
    )
    precision: Literal["fp32", "bf16"] = Field("fp32", description="dtype of computations; log-probs: >= fp32")
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype of frozen weights; trained weights are fp32")
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
