"""pi0 by transformers as a Policy."""

import contextlib
import math
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn

from sparring.errors import UserError
from sparring.normalize import RunningNormalizer, fit_all
from sparring.policies.configs import PI0PolicyConfig
from sparring.policies.critic import PRIVILEGED, Critic
from sparring.policies.encoders import STATE, matching
from sparring.policies.flow.chain import FlowChain
from sparring.policies.lora import adapt
from sparring.policies.pi0.checkpoint import ImagePreparation, checkpoint_folder, load_pi0, transformers

# ---- An env's instructions as the tokens that pi0 reads: image tokens, <bos>, the text, a line break.


# as in ByT5: padding, end and unknown come before the bytes
_BYTES_START = 3
_BYTES_BOS = 1


class Prompts(nn.Module):
    """`observation/task [B]` -> tokens and their mask [B, L]. They follow from the env, not from a checkpoint."""

    def __init__(self, instructions: tuple[str, ...], image_tokens: int, image_token: int, tokens, vocabulary: int):
        """`tokens`: text -> its tokens, <bos> first."""
        super().__init__()
        rows = [[image_token] * image_tokens + tokens(f"{text}\n") for text in instructions]
        largest = max(token for row in rows for token in row[image_tokens:])
        if largest >= vocabulary:
            raise UserError(
                f"policy.tokenizer gives token {largest}, the checkpoint's vocabulary has {vocabulary}; use its own"
            )
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        inside = torch.zeros_like(ids)
        for row, line, mask in zip(rows, ids, inside, strict=True):
            line[: len(row)], mask[: len(row)] = torch.tensor(row), 1
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("inside", inside, persistent=False)

    def forward(self, task: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids[task], self.inside[task]


def make_tokens(tokenizer: str | None, folder: Path):
    """Text -> tokens, by the checkpoint's tokenizer, by another one, or byte by byte where that is asked for."""
    if tokenizer == "bytes":
        return lambda text: [_BYTES_BOS, *(byte + _BYTES_START for byte in text.encode())]
    place = folder if tokenizer is None else Path(tokenizer)
    if not any((place / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        given = f"policy.tokenizer={tokenizer}" if tokenizer else f"policy.model_path={folder}"
        raise UserError(
            f"{given} holds no tokenizer (tokenizer.json); put the checkpoint's own there or name its folder in "
            "policy.tokenizer; policy.tokenizer=bytes reads texts byte by byte, which only a fresh model can learn from"
        )
    try:
        found = transformers().AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of a damaged file the tokenizers library raises no narrower one
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"the tokenizer in '{place}' cannot be loaded: {reason}") from error
    first = [] if found.bos_token_id is None else [found.bos_token_id]
    return lambda text: first + found(text, add_special_tokens=False)["input_ids"]


# ---- pi0 with RL: transformers' own network draws action chunks, and scores them again.
#
# The vision-language model reads images and text once per decision; its keys and values are the prefix that every
# denoising step of the action expert attends to.
#
# Letters: B decisions, H steps of a chunk, A action dims, L tokens, N layers, D width of the vision-language model.


TASK = ("observation", "task")


class PI0Policy(FlowChain):
    """Value head and learned noise read the mean of the vision-language model's last layer, and do not shape it.

    Action dims that the checkpoint has and the env has not are zero in every denoising step, as their clean actions
    are; transformers' sample_actions lets them drift. They are neither drawn nor scored.
    """

    def __init__(self, config: PI0PolicyConfig, spec, chunk: int):
        cameras, folder = _cameras(config, spec), checkpoint_folder(config.model_path)
        _check_precision(config)
        model = load_pi0(config.model_path, config.attention)
        known = model.config
        config = _completed(config, spec, chunk, known)
        width = known.vlm_config.text_config.hidden_size
        super().__init__(config, spec, chunk, width, config.normalize_actions)
        self.model = model
        self.cameras = cameras
        vision = known.vlm_config.vision_config
        self.prepare = ImagePreparation(folder, vision.image_size)
        self.prompts = Prompts(
            spec.instructions,
            len(cameras) * (vision.image_size // vision.patch_size) ** 2,
            known.vlm_config.image_token_id,
            make_tokens(config.tokenizer, folder),
            known.vlm_config.text_config.vocab_size,
        )
        self.state_size = math.prod(spec.observation["state"][0]) if "state" in spec.observation else 0
        fits = self.state_size and config.normalize_observations
        self.normalizer = RunningNormalizer(self.state_size) if fits else None
        self.critic = Critic(config, spec, width, config.normalize_observations)
        self._choose_what_learns()
        self.tells_task = "task" in spec.observation
        self.in_keys = [("observation", *name.split("/")) for name in cameras]
        self.in_keys += [STATE] if self.state_size else []
        self.in_keys += [TASK] if self.tells_task else []
        self.in_keys += [*self.critic.in_keys, *self.trace_keys]

    # ---- FlowChain

    def encode(self, td: TensorDict) -> tuple[torch.Tensor, TensorDict]:
        """Mean features [B, D]; and keys and values [B, N, heads, L, size], the tokens' mask and the padded state."""
        tokens, mask = self._prompt(td)
        # [B, cameras, 3, size, size]
        images = torch.stack([self.prepare(td[("observation", *name.split("/"))]) for name in self.cameras], 1)
        with self._precision():
            seen = torch.ones(images.shape[:2], dtype=torch.bool, device=images.device)
            embedded = self.model.model.embed_prefix(tokens, images, seen)
            read = self.model.model.vlm(
                inputs_embeds=embedded,
                attention_mask=mask,
                position_ids=mask.cumsum(-1) - 1,
                # all of it is prefix: every token attends to every other
                token_type_ids=torch.zeros_like(mask),
                use_cache=True,
            )
        counted = mask[..., None].float()
        features = (read.last_hidden_state.detach().float() * counted).sum(1) / counted.sum(1)
        layers = read.past_key_values.layers
        prefix = {
            "keys": torch.stack([layer.keys for layer in layers], 1),
            "values": torch.stack([layer.values for layer in layers], 1),
            "mask": mask,
            "state": self._state(td, features),
            "features": features,
        }
        return features, TensorDict(prefix, [len(features)], device=features.device)

    def denoise(self, x: torch.Tensor, t: torch.Tensor, prefix: TensorDict) -> torch.Tensor:
        # made anew: the action expert adds its own keys and values to it, which no later step may see
        cache = transformers().DynamicCache()
        for layer, (keys, values) in enumerate(zip(prefix["keys"].unbind(1), prefix["values"].unbind(1), strict=True)):
            cache.update(keys, values, layer)
        padding = self.model.config.max_action_dim - self.action_dim
        with self._precision():
            velocity = self.model(
                state=prefix["state"],
                noise=nn.functional.pad(x, (0, padding)),
                timestep=t,
                attention_mask=prefix["mask"],
                past_key_values=cache,
            ).logits
        return velocity[..., : self.action_dim].float()

    def judge(self, features: torch.Tensor, td: TensorDict) -> torch.Tensor:
        return self.critic(features, td)

    def noise_condition(self, prefix: TensorDict) -> torch.Tensor:
        return prefix["features"]

    # ---- Policy

    def value(self, td: TensorDict) -> torch.Tensor:
        features, _ = self.encode(td)
        return self.judge(features, td)

    @property
    def normalized_keys(self) -> list[tuple[str, ...]]:
        return [key for key in self.in_keys if key in (STATE, PRIVILEGED)]

    def update_normalizers(self, td: TensorDict, sum_over_processes) -> None:
        if self.normalizer is not None:
            self.normalizer.update(td[STATE], sum_over_processes)
        self.critic.update_normalizer(td, sum_over_processes)

    def fit_normalizers(self, statistics, state: str, action: str) -> None:
        normalizers = (self.normalizer, self.critic.privileged, self.actions)
        unfitted = [None if getattr(each, "fitted", False) else each for each in normalizers]
        fit_all(statistics, *unfitted, state, action)

    def critic_parameters(self) -> list[nn.Parameter]:
        return list(self.critic.parameters())

    # ---- parts

    def _prompt(self, td: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        if self.tells_task:
            return self.prompts(td[TASK])
        return self.prompts(torch.zeros(len(td), dtype=torch.int64, device=self.prompts.ids.device))

    def _state(self, td: TensorDict, like: torch.Tensor) -> torch.Tensor:
        """[B, max_state_dim], zero where there is no such entry."""
        wanted = self.model.config.max_state_dim
        if not self.state_size:
            return like.new_zeros(len(like), wanted)
        state = td[STATE] if self.normalizer is None else self.normalizer(td[STATE])
        return nn.functional.pad(state.float(), (0, wanted - self.state_size))

    def _precision(self):
        if self.config.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.prompts.ids.device.type, torch.bfloat16)

    def _choose_what_learns(self) -> None:
        config, model = self.config, self.model
        if config.lora_r and config.frozen:
            raise UserError(
                f"policy.frozen={list(config.frozen)} is not read with policy.lora_r: all but adapters and "
                "policy.modules_to_save is frozen then; choose with policy.lora_targets"
            )
        frozen = set(matching((name for name, _ in model.named_parameters()), config.frozen, "policy.frozen"))
        adapt(model, config)
        # weight decay alone would move them, and the features that the critic is told with them
        unread = _unread(model)
        for name, parameter in model.named_parameters():
            if name in frozen or name.startswith(unread):
                parameter.requires_grad_(False)
            # matrices are what takes memory; norms and biases stay exact
            if config.dtype == "bf16" and not parameter.requires_grad and parameter.ndim > 1:
                parameter.data = parameter.data.bfloat16()


def _unread(model: nn.Module) -> tuple[str, ...]:
    """Weights that no velocity depends on: of the last layer only keys and values are read, and no text is written."""
    last = f"model.vlm.language_model.layers.{len(model.model.vlm.language_model.layers) - 1}"
    after = ("self_attn.q_proj", "self_attn.o_proj", "mlp", "post_attention_layernorm")
    return ("model.dit.embed_tokens.", "model.vlm.language_model.norm.", *(f"{last}.{part}." for part in after))


def _cameras(config: PI0PolicyConfig, spec) -> list[str]:
    shown = [name for name in spec.observation if name.startswith("image/")]
    if not shown:
        raise UserError(
            "policy.name=pi0 looks at images, but this env shows none; give it cameras, e.g. env.cameras=[head]"
        )
    wanted = [f"image/{name.removeprefix('image/')}" for name in config.cameras] or shown
    unknown = [name.removeprefix("image/") for name in wanted if name not in shown]
    if unknown:
        known = ", ".join(name.removeprefix("image/") for name in shown)
        raise UserError(f"policy.cameras: this env has no camera '{unknown[0]}'; it has {known}")
    return wanted


def _check_precision(config: PI0PolicyConfig) -> None:
    if config.dtype == "bf16" and config.precision != "bf16":
        raise UserError("policy.dtype=bf16 needs policy.precision=bf16: weights in bf16 cannot compute in fp32")


def _completed(config: PI0PolicyConfig, spec, chunk: int, known) -> PI0PolicyConfig:
    """With the checkpoint's numbers where none are given; refuses what does not fit them."""
    if config.horizon not in (None, known.chunk_size):
        raise UserError(
            f"policy.horizon={config.horizon}: the checkpoint plans chunks of {known.chunk_size} steps; leave it out"
        )
    if chunk > known.chunk_size:
        raise UserError(
            f"rollout.action_steps={chunk} is more than the {known.chunk_size} steps that the checkpoint plans"
        )
    state = math.prod(spec.observation["state"][0]) if "state" in spec.observation else 0
    dims = spec.action_dim - spec.action_padding
    for what, has, most in (("state", state, known.max_state_dim), ("action", dims, known.max_action_dim)):
        if has > most:
            hint = "env.object_state=hidden leaves out where goal and objects are; or " if what == "state" else ""
            raise UserError(
                f"this env's {what} has {has} numbers, the checkpoint takes {most} at most (max_{what}_dim); {hint}use "
                "another env or checkpoint"
            )
    steps = config.sampling_steps or known.num_inference_steps
    return config.model_copy(update={"horizon": known.chunk_size, "sampling_steps": steps})
