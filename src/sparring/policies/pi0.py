"""pi0 by transformers (extra `vla`): its checkpoints, its image processor, and its network as a policy.

Letters: B decisions, H steps of a chunk, A action dims, L tokens, N layers, D width of the vision-language model."""

import math
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
from sparring.policies.encoders import STATE, TASK
from sparring.policies.flow.chain import FlowChain
from sparring.policies.instructions import BYTES, ByteTokenizer, TokenTable, load_tokenizer
from sparring.policies.lora import adapt
from sparring.policies.weights import WeightsFit, match_names, read_json, refuse_code_of_adapters
from sparring.processes.memory import oom_message

# what transformers may raise where a config or its weights are not what they should be
_FILE_ERRORS: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, LookupError, TypeError)
_FILE_ERRORS += (AttributeError, ArithmeticError, AssertionError, SafetensorError)
_BYTES_BEGIN, _BYTES_OFFSET = 1, 3  # as in ByT5: padding, begin (there: end) and unknown come before the bytes
_RESAMPLING = {2: "bilinear", 3: "bicubic"}  # PIL's numbers of the ways to resize


class PI0Policy(FlowChain):
    """Critic and learned noise read the mean of the language model's last layer, without gradients to it.
    Action dims that only the checkpoint has are zero in every denoising step, and neither drawn nor scored."""

    config: PI0PolicyConfig
    model: Any  # transformers' PI0ForConditionalGeneration

    def __init__(self, config: PI0PolicyConfig, spec: EnvSpec, chunk: int):
        cameras, folder = _cameras(config, spec), _checkpoint_folder(config.model_path)
        if config.dtype == "bf16" and config.precision != "bf16":
            raise UserError("policy.dtype=bf16 needs policy.precision=bf16: weights in bf16 cannot compute in fp32")
        model = load_pi0(config.model_path, config.attention)
        known = model.config
        config = _completed(config, spec, chunk, known)
        text, vision = known.vlm_config.text_config, known.vlm_config.vision_config
        super().__init__(config, spec, chunk, text.hidden_size, config.normalize_actions)
        self.model, self.spec, self.cameras = model, spec, cameras
        self.prepare = ImagePreparation(folder, vision.image_size)
        image_tokens = len(cameras) * (vision.image_size // vision.patch_size) ** 2
        self.prompts = _prompts(config, folder, spec, known.vlm_config, image_tokens)
        self.state_size = math.prod(spec.observation["state"][0]) if "state" in spec.observation else 0
        normalizes = self.state_size and config.normalize_observations
        self.normalizer = RunningNormalizer(self.state_size) if normalizes else None
        self.critic = Critic(config, spec, text.hidden_size, config.normalize_observations)
        self._choose_what_learns()
        self.reads_task = "task" in spec.observation
        self.in_keys = [("observation", *name.split("/")) for name in cameras]
        self.in_keys += [key for key, is_read in ((STATE, self.state_size), (TASK, self.reads_task)) if is_read]
        self.in_keys += [*self.critic.in_keys, *self.trace_keys]

    def encode(self, td: TensorDict) -> tuple[torch.Tensor, TensorDict]:
        """Mean features [B, D]; and keys and values [B, N, heads, L, size], the tokens' mask and the padded state."""
        none = torch.zeros(len(td), dtype=torch.int64, device=self.times.device)
        tokens, mask = self.prompts(entry_of(td, self.spec, "task") if self.reads_task else none)
        mask = mask.long()
        # [B, cameras, 3, size, size]
        images = torch.stack([self.prepare(view) for view in images_of(td, self.spec, self.cameras)], 1)
        with self._precision():
            seen = torch.ones(images.shape[:2], dtype=torch.bool, device=images.device)
            embedded = self.model.model.embed_prefix(tokens, images, seen)
            # all of it is prefix: every token attends to every other
            masks = {"attention_mask": mask, "token_type_ids": torch.zeros_like(mask)}
            places = mask.cumsum(-1) - 1
            read = self.model.model.vlm(inputs_embeds=embedded, position_ids=places, use_cache=True, **masks)
        counted = mask[..., None].float()
        features = (read.last_hidden_state.detach().float() * counted).sum(1) / counted.sum(1)
        # [B, max_state_dim], zero where there is no such entry
        state = entry_of(td, self.spec, "state") if self.state_size else features[:, :0]
        state = state if self.normalizer is None else self.normalizer(state)
        layers = read.past_key_values.layers
        prefix = {name: torch.stack([getattr(layer, name) for layer in layers], 1) for name in ("keys", "values")}
        state = nn.functional.pad(state.float(), (0, self.model.config.max_state_dim - self.state_size))
        prefix |= {"mask": mask, "state": state, "features": features}
        return features, TensorDict(prefix, [len(features)], device=features.device)

    def denoise(self, x: torch.Tensor, t: torch.Tensor, prefix: TensorDict) -> torch.Tensor:
        # made anew: the action expert adds its own keys and values to it, which no later step may see
        cache = transformers().DynamicCache()
        for layer, (keys, values) in enumerate(zip(prefix["keys"].unbind(1), prefix["values"].unbind(1), strict=True)):
            cache.update(keys, values, layer)
        padding = self.model.config.max_action_dim - self.action_dim
        with self._precision():
            known = {"state": prefix["state"], "attention_mask": prefix["mask"], "past_key_values": cache}
            velocity = self.model(noise=nn.functional.pad(x, (0, padding)), timestep=t, **known).logits
        return velocity[..., : self.action_dim].float()

    def _normalizers(self) -> dict[str, nn.Module | None]:
        return super()._normalizers() | {"observation/state": self.normalizer}

    def _choose_what_learns(self) -> None:
        config, model = self.config, self.model
        if config.lora_r and config.frozen:
            why = "all but adapters and policy.modules_to_save is frozen then; choose with policy.lora_targets"
            raise UserError(f"policy.frozen={list(config.frozen)} is not read with policy.lora_r: {why}")
        frozen = set(match_names((name for name, _ in model.named_parameters()), config.frozen, "policy.frozen"))
        adapt(model, config)
        # no velocity depends on these; weight decay alone would move them, and with them the critic's features
        last = f"model.vlm.language_model.layers.{len(model.model.vlm.language_model.layers) - 1}"
        after = ("self_attn.q_proj", "self_attn.o_proj", "mlp", "post_attention_layernorm")
        unread = ("model.dit.embed_tokens.", "model.vlm.language_model.norm.", *(f"{last}.{part}." for part in after))
        for name, parameter in model.named_parameters():
            if name in frozen or name.startswith(unread):
                parameter.requires_grad_(False)
            # matrices are what takes memory; norms and biases stay exact
            if config.dtype == "bf16" and not parameter.requires_grad and parameter.ndim > 1:
                parameter.data = parameter.data.bfloat16()


def _cameras(config: PI0PolicyConfig, spec: EnvSpec) -> list[str]:
    shown = [name for name in spec.observation if name.startswith("image/")]
    if not shown:
        advice = "it must observe image/<name> (env.name=tabletop: env.cameras=[head])"
        raise UserError(f"policy.name=pi0 looks at images, but this env shows none; {advice}")
    wanted = [f"image/{name.removeprefix('image/')}" for name in config.cameras] or shown
    unknown = [name.removeprefix("image/") for name in wanted if name not in shown]
    if unknown:
        known = ", ".join(name.removeprefix("image/") for name in shown)
        raise UserError(f"policy.cameras: this env has no camera '{unknown[0]}'; it has {known}")
    return wanted


def _completed(config: PI0PolicyConfig, spec: EnvSpec, chunk: int, known) -> PI0PolicyConfig:
    """With the checkpoint's numbers where none are given; refuses what does not fit them."""
    plan = known.chunk_size
    if config.horizon not in (None, plan):
        raise UserError(f"policy.horizon={config.horizon}: the checkpoint plans chunks of {plan} steps; leave it out")
    if chunk > plan:
        raise UserError(f"rollout.action_steps={chunk} is more than the {plan} steps that the checkpoint plans")
    state = math.prod(spec.observation["state"][0]) if "state" in spec.observation else 0
    dims = spec.action_dim - spec.action_padding
    for what, has, most in (("state", state, known.max_state_dim), ("action", dims, known.max_action_dim)):
        if has > most:
            hint = "env.object_state=hidden leaves out where goal and objects are; or " if what == "state" else ""
            takes = f"the checkpoint takes {most} at most (max_{what}_dim)"
            raise UserError(f"this env's {what} has {has} numbers, {takes}; {hint}use another env or checkpoint")
    steps = config.sampling_steps or known.num_inference_steps
    return config.model_copy(update={"horizon": plan, "sampling_steps": steps})


def _prompts(config: PI0PolicyConfig, folder: Path, spec: EnvSpec, vlm, image_tokens: int) -> TokenTable:
    """Instructions as pi0 reads them: image tokens, <bos>, the text, a line break."""
    texts = [f"{text}\n" for text in spec.instructions]
    if config.tokenizer == BYTES:
        rows = list(map(ByteTokenizer(_BYTES_BEGIN, _BYTES_OFFSET), texts))
    else:
        given = f"policy.tokenizer={config.tokenizer}" if config.tokenizer else f"policy.model_path={folder}"
        tokenizer = load_tokenizer(config.tokenizer or folder, given)
        begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        rows = [begin + tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    vocabulary = vlm.text_config.vocab_size
    largest = max(token for row in rows for token in row)
    if largest >= vocabulary:
        has = f"the checkpoint's vocabulary has {vocabulary}"
        raise UserError(f"policy.tokenizer gives token {largest}, {has}; use its own")
    return TokenTable([[vlm.image_token_id] * image_tokens + row for row in rows])


def transformers():
    try:
        import transformers
        from transformers import PI0ForConditionalGeneration  # noqa: F401 (older ones have none)
    except ImportError:
        raise UserError('pi0 needs transformers >= 5.17, which is not here: pip install "sparring[vla]"') from None
    return transformers


def load_pi0(
    path: str | Path | None, attention: str = "eager", dtype: str = "float32", key: str = "policy.model_path"
) -> Any:
    """transformers' PI0ForConditionalGeneration with every weight of the folder and no other. Nothing is downloaded."""
    folder, library = _checkpoint_folder(path, key), transformers()
    from huggingface_hub.errors import StrictDataclassError

    unreadable: tuple[type[Exception], ...] = (*_FILE_ERRORS, StrictDataclassError)
    library.utils.logging.disable_progress_bar()  # its bars would run into the progress of the run
    try:
        load = partial(library.PI0ForConditionalGeneration.from_pretrained, local_files_only=True, use_safetensors=True)
        reports = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = load(folder, dtype=dtype, attn_implementation=attention, **reports)
    except unreadable as error:
        if oom_message(error):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{key}={path} cannot be loaded as pi0: {reason}") from error
    # the words of the action expert are never read
    fit = WeightsFit.of_transformers(info, new=("model.dit.embed_tokens",))
    if not fit.exact:
        raise UserError(f"{key}={path}: its weights do not fit its config.json: {fit.sentence}")
    return model.eval()


def _checkpoint_folder(path: str | Path | None, key: str = "policy.model_path") -> Path:
    if path is None:
        raise UserError(f"{key} is needed: a folder with a pi0 checkpoint, as transformers' save_pretrained writes it")
    folder = Path(path).expanduser()
    file = folder / "config.json"
    if not file.is_file():
        advice = "download the checkpoint first (nothing is downloaded here), and give its folder"
        raise UserError(f"{key}={path}: there is no config.json in such a folder; {advice}")
    kind = read_json(file).get("model_type")
    if kind != "pi0":
        raise UserError(f"{key}={path}: config.json says model_type={kind!r}, expected 'pi0'")
    refuse_code_of_adapters(folder)
    return folder


class ImagePreparation(nn.Module):
    """A checkpoint's image processor in torch: uint8 [B, 3, H, W] -> float32 [B, 3, size, size]: resize, scale, pad.
    With a height and a width it stretches; with a maximum of both it keeps the proportions."""

    def __init__(self, folder: Path, size: int):
        super().__init__()
        settings = _processor_settings(folder)
        self.size = size
        shape = settings.get("size") or {}
        if not isinstance(shape, dict):
            raise UserError(f"'{folder}': its image processor has size={shape}; expected height and width")
        self.keeps_proportions = "height" not in shape
        height, width = (shape.get(side) or shape.get(f"max_{side}", size) for side in ("height", "width"))
        if (height, width) != (size, size):
            reads = f"its vision model reads {size}x{size}"
            raise UserError(f"'{folder}': its image processor makes images of {height}x{width}, {reads}")
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
        wanted = self.size, self.size
        if self.keeps_proportions:
            shrink = min(self.size / height, self.size / width)
            wanted = int(height * shrink), int(width * shrink)
        image = image.float()
        # one direction after the other, with whole numbers in between, as PIL and torchvision do
        image = self._resized(self._resized(image, (height, wanted[1])), wanted)
        image = image * self.scale - self.shift
        return nn.functional.pad(image, (0, self.size - wanted[1], 0, self.size - wanted[0]))

    def _resized(self, image: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        if size == image.shape[-2:]:
            return image
        image = nn.functional.interpolate(image, size, mode=self.mode, antialias=True, align_corners=False)
        return image.add_(0.5).floor_().clamp_(0, 255)


def _processor_settings(folder: Path) -> dict:
    """What the checkpoint says of its image processor; {} where it says nothing, which means pi0's own."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            settings = read_json(folder / name)
            inner = settings.get("image_processor", settings)
            if not isinstance(inner, dict):
                raise UserError(f"'{folder / name}': image_processor is {inner!r}, expected names with values")
            return inner
    return {}
