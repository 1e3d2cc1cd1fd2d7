"""pi0 through transformers (extra `vla`): its checkpoints, its image processor, and its network as a policy.

Letters: B decisions, H steps of a chunk, A action dims, L tokens, N layers, D width of the vision-language model."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tensordict import TensorDict
from torch import nn

from sparring.contract import EnvSpec, entry_of, images_of
from sparring.errors import UserError
from sparring.normalize import RunningNormalizer
from sparring.policies.configs import PI0PolicyConfig
from sparring.policies.critic import Critic
from sparring.policies.encoders import STATE
from sparring.policies.flow.chain import FlowChain
from sparring.policies.instructions import BYTES, ByteTokenizer, Instructions, load_tokenizer
from sparring.policies.lora import adapt
from sparring.policies.weights import WeightsFit, match_names, read_json, refuse_code_of_adapters
from sparring.processes.memory import oom_message

# exceptions of transformers for invalid configs or weights
_FILE_ERRORS: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, LookupError, TypeError)
_FILE_ERRORS += (AttributeError, ArithmeticError, AssertionError, SafetensorError)
_BYTES_BEGIN, _BYTES_OFFSET = 1, 3  # as in ByT5: padding, begin (there: end) and unknown come before the bytes
_RESAMPLING = {2: "bilinear", 3: "bicubic"}  # PIL's constants


class PI0Policy(FlowChain):
    """The critic and learned noise read the mean of the language model's last layer, without gradients to it.
    Action dims of the checkpoint that the env does not have are zero in every denoising step: not drawn, not scored."""

    config: PI0PolicyConfig
    model: Any  # transformers' PI0ForConditionalGeneration

    def __init__(self, config: PI0PolicyConfig, spec: EnvSpec, chunk: int):
        cameras, folder = _cameras(config, spec), _checkpoint_folder(config.model_path)
        if config.dtype == "bf16" and config.precision != "bf16":
            raise UserError("policy.dtype=bf16 needs policy.precision=bf16: bf16 weights cannot compute in fp32")
        model = load_pi0(config.model_path, config.attention)
        sizes = model.config
        config = _completed(config, spec, chunk, sizes)
        text, vision = sizes.vlm_config.text_config, sizes.vlm_config.vision_config
        super().__init__(config, spec, chunk, text.hidden_size, config.normalize_actions)
        self.model, self.spec, self.cameras = model, spec, cameras
        self.prepare = ImagePreparation(folder, vision.image_size)
        image_tokens = len(cameras) * (vision.image_size // vision.patch_size) ** 2
        self.prompts = _prompts(config, folder, spec, sizes.vlm_config, image_tokens)
        self.state_size = math.prod(spec.observation["state"][0]) if "state" in spec.observation else 0
        normalizes = self.state_size and config.normalize_observations
        self.normalizer = RunningNormalizer(self.state_size) if normalizes else None
        self.critic = Critic(config, spec, text.hidden_size, config.normalize_observations)
        self._freeze_weights()
        self.in_keys = [("observation", *name.split("/")) for name in cameras]
        self.in_keys += [*([STATE] if self.state_size else []), *self.prompts.in_keys]
        self.in_keys += [*self.critic.in_keys, *self.trace_keys]

    def encode(self, td: TensorDict) -> tuple[torch.Tensor, TensorDict]:
        """Mean features [B, D]; and keys and values [B, N, heads, L, size], the tokens' mask and the padded state."""
        tokens, mask = self.prompts(td)
        mask = mask.long()
        # [B, cameras, 3, size, size]
        images = torch.stack([self.prepare(view) for view in images_of(td, self.spec, self.cameras)], 1)
        with self._precision():
            present = torch.ones(images.shape[:2], dtype=torch.bool, device=images.device)
            embedded = self.model.model.embed_prefix(tokens, images, present)
            # token type 0 is the prefix, in which every token attends to every other
            masks = {"attention_mask": mask, "token_type_ids": torch.zeros_like(mask)}
            positions = mask.cumsum(-1) - 1
            output = self.model.model.vlm(inputs_embeds=embedded, position_ids=positions, use_cache=True, **masks)
        counted = mask[..., None].float()
        features = (output.last_hidden_state.detach().float() * counted).sum(1) / counted.sum(1)
        # padded with zeros to [B, max_state_dim]
        state = entry_of(td, self.spec, "state") if self.state_size else features[:, :0]
        state = state if self.normalizer is None else self.normalizer(state)
        layers = output.past_key_values.layers
        prefix = {name: torch.stack([getattr(layer, name) for layer in layers], 1) for name in ("keys", "values")}
        state = nn.functional.pad(state.float(), (0, self.model.config.max_state_dim - self.state_size))
        prefix |= {"mask": mask, "state": state, "features": features}
        return features, TensorDict(prefix, [len(features)], device=features.device)

    def denoise(self, x: torch.Tensor, t: torch.Tensor, prefix: TensorDict) -> torch.Tensor:
        # a new cache per step: the action expert appends keys and values that later steps must not attend to
        cache = transformers().DynamicCache()
        for layer, (keys, values) in enumerate(zip(prefix["keys"].unbind(1), prefix["values"].unbind(1), strict=True)):
            cache.update(keys, values, layer)
        padding = self.model.config.max_action_dim - self.action_dim
        with self._precision():
            cached = {"state": prefix["state"], "attention_mask": prefix["mask"], "past_key_values": cache}
            velocity = self.model(noise=nn.functional.pad(x, (0, padding)), timestep=t, **cached).logits
        return velocity[..., : self.action_dim].float()

    def _normalizers(self) -> dict[str, nn.Module | None]:
        return super()._normalizers() | {"observation/state": self.normalizer}

    def _freeze_weights(self) -> None:
        config, model = self.config, self.model
        if config.lora_r and config.frozen:
            why = "only adapters and policy.modules_to_save learn; select layers with policy.lora_targets"
            raise UserError(f"policy.frozen={list(config.frozen)} is not read with policy.lora_r: {why}")
        frozen = set(match_names((name for name, _ in model.named_parameters()), config.frozen, "policy.frozen"))
        adapt(model, config)
        # the velocity does not depend on these: only weight decay would change them, and so the critic's features
        last = f"model.vlm.language_model.layers.{len(model.model.vlm.language_model.layers) - 1}"
        after = ("self_attn.q_proj", "self_attn.o_proj", "mlp", "post_attention_layernorm")
        unused = ("model.dit.embed_tokens.", "model.vlm.language_model.norm.", *(f"{last}.{part}." for part in after))
        for name, parameter in model.named_parameters():
            if name in frozen or name.startswith(unused):
                parameter.requires_grad_(False)
            # only matrices, which take most of the memory; norms and biases keep full precision
            if config.dtype == "bf16" and not parameter.requires_grad and parameter.ndim > 1:
                parameter.data = parameter.data.bfloat16()


def _cameras(config: PI0PolicyConfig, spec: EnvSpec) -> list[str]:
    available = [name for name in spec.observation if name.startswith("image/")]
    if not available:
        advice = "use an env with image/<name> (env.name=tabletop: env.cameras=[head])"
        raise UserError(f"policy.name=pi0 needs images, but this env has none; {advice}")
    cameras = [f"image/{name.removeprefix('image/')}" for name in config.cameras] or available
    unknown = [name.removeprefix("image/") for name in cameras if name not in available]
    if unknown:
        known = ", ".join(name.removeprefix("image/") for name in available)
        raise UserError(f"policy.cameras: this env has no camera '{unknown[0]}'; it has {known}")
    return cameras


def _completed(config: PI0PolicyConfig, spec: EnvSpec, chunk: int, sizes) -> PI0PolicyConfig:
    """Fill in the checkpoint's horizon and sampling steps; raise if config or env do not fit its sizes."""
    horizon = sizes.chunk_size
    if config.horizon not in (None, horizon):
        raise UserError(f"policy.horizon={config.horizon}: the checkpoint plans {horizon} steps; remove the setting")
    if chunk > horizon:
        raise UserError(f"rollout.action_steps={chunk} is more than the checkpoint's {horizon} planned steps; lower it")
    state = math.prod(spec.observation["state"][0]) if "state" in spec.observation else 0
    dims = spec.action_dim - spec.action_padding
    for name, size, limit in (("state", state, sizes.max_state_dim), ("action", dims, sizes.max_action_dim)):
        if size > limit:
            hint = "set env.object_state=hidden to leave out goal and objects, or " if name == "state" else ""
            most = f"the checkpoint supports at most {limit} (max_{name}_dim)"
            raise UserError(f"this env's {name} has {size} numbers, {most}; {hint}use another env or checkpoint")
    steps = config.sampling_steps or sizes.num_inference_steps
    return config.model_copy(update={"horizon": horizon, "sampling_steps": steps})


def _prompts(config: PI0PolicyConfig, folder: Path, spec: EnvSpec, vlm, image_tokens: int) -> Instructions:
    """Token ids of pi0's prompts: image tokens, <bos>, the instruction, a line break."""
    vocabulary = vlm.text_config.vocab_size
    if config.tokenizer == BYTES:
        tokenize: Callable[[str], list[int]] = ByteTokenizer(_BYTES_BEGIN, _BYTES_OFFSET)
    else:
        given = f"policy.tokenizer={config.tokenizer}" if config.tokenizer else f"policy.model_path={folder}"
        tokenizer = load_tokenizer(config.tokenizer or folder, given)
        begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

        def tokenize(text: str) -> list[int]:
            return begin + tokenizer(text, add_special_tokens=False)["input_ids"]

    def tokens_of(text: str) -> list[int]:
        row = tokenize(f"{text}\n")
        if max(row) >= vocabulary:
            has = f"the checkpoint's vocabulary has {vocabulary} tokens"
            raise UserError(f"policy.tokenizer returns token {max(row)}, but {has}; use the checkpoint's tokenizer")
        return [vlm.image_token_id] * image_tokens + row

    length = None
    if "instruction" in spec.observation:
        length = image_tokens + spec.observation["instruction"][0][0] + 2  # a token per byte, <bos> and a line break
    return Instructions(spec, tokens_of, length)


def transformers():
    try:
        import transformers
        from transformers import PI0ForConditionalGeneration  # noqa: F401 (missing in older versions)
    except ImportError:
        raise UserError('pi0 needs transformers >= 5.17, not installed here: pip install "sparring[vla]"') from None
    return transformers


def load_pi0(
    path: str | Path | None, attention: str = "eager", dtype: str = "float32", key: str = "policy.model_path"
) -> Any:
    """Load a folder as transformers' PI0ForConditionalGeneration; its weights must match exactly. No downloads."""
    folder, library = _checkpoint_folder(path, key), transformers()
    from huggingface_hub.errors import StrictDataclassError

    unreadable: tuple[type[Exception], ...] = (*_FILE_ERRORS, StrictDataclassError)
    library.utils.logging.disable_progress_bar()  # its bars would disturb the output of the run
    try:
        load = partial(library.PI0ForConditionalGeneration.from_pretrained, local_files_only=True, use_safetensors=True)
        reports = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = load(folder, dtype=dtype, attn_implementation=attention, **reports)
    except unreadable as error:
        if oom_message(error):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{key}={path} cannot be loaded as pi0: {reason}") from error
    # token embeddings of the action expert are not used
    fit = WeightsFit.of_transformers(info, new=("model.dit.embed_tokens",))
    if not fit.exact:
        raise UserError(f"{key}={path}: its weights do not fit its config.json: {fit.sentence}")
    return model.eval()


def _checkpoint_folder(path: str | Path | None, key: str = "policy.model_path") -> Path:
    if path is None:
        raise UserError(f"{key} is not set; give a folder with a pi0 checkpoint from transformers' save_pretrained")
    folder = Path(path).expanduser()
    file = folder / "config.json"
    if not file.is_file():
        advice = "download the checkpoint first (Sparring does not download), and give its folder"
        raise UserError(f"{key}={path}: this folder has no config.json; {advice}")
    kind = read_json(file).get("model_type")
    if kind != "pi0":
        raise UserError(f"{key}={path}: config.json has model_type={kind!r}, expected 'pi0'")
    refuse_code_of_adapters(folder)
    return folder


class ImagePreparation(nn.Module):
    """A checkpoint's image processor in torch, uint8 [B, 3, H, W] -> float32 [B, 3, size, size]: resize, scale, pad.
    If its settings have height and width, images are stretched; if they have maxima, images keep their aspect ratio."""

    def __init__(self, folder: Path, size: int):
        super().__init__()
        settings = _processor_settings(folder)
        self.size = size
        shape = settings.get("size") or {}
        if not isinstance(shape, dict):
            raise UserError(f"'{folder}': its image processor has size={shape}; expected height and width")
        self.keeps_aspect = "height" not in shape
        height, width = (shape.get(side) or shape.get(f"max_{side}", size) for side in ("height", "width"))
        if (height, width) != (size, size):
            expected = f"its vision model expects {size}x{size}"
            raise UserError(f"'{folder}': its image processor makes images of {height}x{width}, but {expected}")
        resample = settings.get("resample", 3)
        if resample not in tuple(_RESAMPLING):
            raise UserError(f"'{folder}': its image processor has resample={resample}; expected 2 or 3")
        self.mode = _RESAMPLING[resample]

        def numbers(name: str, given, count: int) -> list[float]:
            if not (isinstance(given, list) and len(given) == count and all(isinstance(x, int | float) for x in given)):
                raise UserError(f"'{folder}': its image processor has {name}={given}; expected {count} numbers")
            return [float(x) for x in given]

        (factor,) = numbers("rescale_factor", [settings.get("rescale_factor", 1 / 255)], 1)
        mean, std = (
            torch.tensor(numbers(name, settings.get(name, [0.5] * 3), 3)).view(3, 1, 1)
            for name in ("image_mean", "image_std")
        )
        self.scale = nn.Buffer(factor / std, persistent=False)
        self.shift = nn.Buffer(mean / std, persistent=False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        height, width = image.shape[-2:]
        target = self.size, self.size
        if self.keeps_aspect:
            factor = min(self.size / height, self.size / width)
            target = int(height * factor), int(width * factor)
        image = image.float()
        # width first, then height, rounded to integers in between, as in PIL and torchvision
        image = self._resized(self._resized(image, (height, target[1])), target)
        image = image * self.scale - self.shift
        return nn.functional.pad(image, (0, self.size - target[1], 0, self.size - target[0]))

    def _resized(self, image: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        if size == image.shape[-2:]:
            return image
        image = nn.functional.interpolate(image, size, mode=self.mode, antialias=True, align_corners=False)
        return image.add_(0.5).floor_().clamp_(0, 255)


def _processor_settings(folder: Path) -> dict:
    """The checkpoint's settings of its image processor; {} if it has none: then the defaults of pi0 apply."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            settings = read_json(folder / name)
            inner = settings.get("image_processor", settings)
            if not isinstance(inner, dict):
                raise UserError(f"'{folder / name}': image_processor is {inner!r}, expected names mapped to values")
            return inner
    return {}
