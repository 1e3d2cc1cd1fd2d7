"""Checkpoints of the native VLA: folders with weights and sizes, and conversion from and to transformers' pi0."""

import json
import shutil
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors.torch import load_file, save_file

from sparring.errors import UserError
from sparring.policies.native.config import Sizes
from sparring.policies.native.model import NativeModel
from sparring.policies.pi0 import load_pi0, transformers
from sparring.policies.weights import Weights, read_json

_SIZES, _WEIGHTS, _TOKENIZER = "native_vla.json", "model.safetensors", "tokenizer.json"

# our layers -> transformers' layers, whose weights are concatenated in this order
_VISION_LAYER = {
    "attention_norm": ("layer_norm1",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.out_proj",),
    "mlp_norm": ("layer_norm2",),
    "up": ("mlp.fc1",),
    "down": ("mlp.fc2",),
}
_LAYER = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_BOTH = (".weight", ".bias")
# fixed in the native VLA: the required values in transformers' configs
_FIXED = {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "attention_bias": False}
_FIXED_VISION = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "num_channels": 3}
_FIXED_ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}
_FIXED_TIME = {"min_period": 4e-3, "max_period": 4.0}
# our names of sizes -> names in transformers' configs of vision, text, actions and of the whole model
_VISION_SIZES = {"image_size": "image_size", "patch_size": "patch_size", "vision_width": "hidden_size"}
_VISION_SIZES |= {"vision_layers": "num_hidden_layers", "vision_heads": "num_attention_heads"}
_VISION_SIZES |= {"vision_mlp": "intermediate_size"}
_TEXT_SIZES = {"vocabulary": "vocab_size", "width": "hidden_size", "mlp": "intermediate_size"}
_TEXT_SIZES |= {"layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
_TEXT_SIZES |= {"head_dim": "head_dim"}
_ACTION_SIZES = {"expert_width": "hidden_size", "expert_mlp": "intermediate_size"}
_OWN_SIZES = {"max_state_dim": "max_state_dim", "max_action_dim": "max_action_dim"}


class SavedModel(NamedTuple):
    weights: Weights
    sizes: Sizes
    horizon: int | None = None  # planned steps of a pi0 checkpoint
    sampling_steps: int | None = None
    is_pi0: bool = False
    needs_tokenizer: bool = False  # whether it reads text with the tokenizer.json in its folder


def save_model(model: NativeModel, folder: str | Path, tokenizer: str | Path | None = None) -> None:
    """Save weights and sizes for policy.model_path, and the `tokenizer.json` of the folder `tokenizer` if given."""
    _refuse_adapters(model, "save_model")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / _WEIGHTS)
    (folder / _SIZES).write_text(json.dumps(asdict(model.sizes), indent=2) + "\n")
    if tokenizer is not None:
        shutil.copyfile(Path(tokenizer) / _TOKENIZER, folder / _TOKENIZER)


def read_model(folder: str | Path, key: str = "policy.model_path") -> SavedModel:
    """Read a folder written by `save_model`, or a pi0 saved by transformers. `key`: the setting that named it."""
    path = Path(folder).expanduser()
    if (path / _SIZES).is_file():
        try:
            sizes, has_tokenizer = Sizes(**read_json(path / _SIZES)), (path / _TOKENIZER).is_file()
            return SavedModel(load_file(path / _WEIGHTS), sizes, needs_tokenizer=has_tokenizer)
        except (UserError, TypeError, OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{path} holds no valid checkpoint of a native VLA: {error}") from error
    if (path / "config.json").is_file():
        kind = read_json(path / "config.json").get("model_type")
        if kind != "pi0":
            hint = "; for other models use policy.name=vla" if key.startswith("policy.") else ""
            raise UserError(f"{key}={folder} holds a model of type {kind!r}, expected 'pi0'{hint}")
        pi0 = load_pi0(folder, dtype="auto", key=key)
        steps = pi0.config.chunk_size, pi0.config.num_inference_steps
        return SavedModel(*_from_transformers(pi0), *steps, is_pi0=True, needs_tokenizer=True)
    missing = "a file, not a folder" if path.is_file() else "no such folder"
    found = ", ".join(sorted(each.name for each in path.iterdir())[:8]) if path.is_dir() else missing
    neither = f"neither {_SIZES} (a native VLA) nor config.json (transformers' pi0)"
    raise UserError(f"{key}={folder}: {neither} exists there ({found}); give a folder with one of them")


def _from_transformers(source) -> tuple[Weights, Sizes]:
    """Convert a `PI0ForConditionalGeneration`, or a folder written by its `save_pretrained`."""
    model = load_pi0(source, dtype="auto") if isinstance(source, str | Path) else source
    sizes, theirs = _sizes(model.config), {_unwrapped(name): value for name, value in model.state_dict().items()}
    weights = {}
    for ours, names in _names(sizes).items():
        weights[ours] = torch.cat([theirs.pop(name) for name in names]) if len(names) > 1 else theirs.pop(names[0])
    # ignored: token embeddings of the action expert, which are not used, and the language model's head
    unknown = [name for name in theirs if not name.startswith("model.dit.embed_tokens") and "lm_head" not in name]
    if unknown:
        raise UserError(f"the pi0 model has weights that the native VLA does not have: {', '.join(unknown[:5])}")
    return weights, sizes


def to_transformers(model: NativeModel):
    """Convert to an equivalent `PI0ForConditionalGeneration`, in the widest dtype of the weights."""
    _refuse_adapters(model, "to_transformers")
    library = transformers()
    if model.sizes.memory_size:
        raise UserError(f"pi0 has no memory, but policy.memory_size={model.sizes.memory_size}; train with 0 to convert")
    theirs = library.PI0ForConditionalGeneration(library.PI0Config(**_settings_of(model.sizes)))
    ours = model.state_dict()
    weights: Weights = {}
    queries, keys = (count * model.sizes.head_dim for count in (model.sizes.heads, model.sizes.kv_heads))
    for name, names in _names(model.sizes).items():
        grouped = name.endswith("qkv.weight") and not name.startswith("vision.")
        parts = ours[name].split([queries, keys, keys]) if grouped else ours[name].chunk(len(names))
        weights |= dict(zip(names, parts, strict=True))
    given = {name: weights.pop(_unwrapped(name)) for name in theirs.state_dict() if _unwrapped(name) in weights}
    missing, _ = theirs.load_state_dict(given, strict=False)
    left = [name for name in missing if not name.startswith("model.dit.embed_tokens")]
    if left or weights:
        raise UserError(f"the pi0 of this transformers version has other weights: {', '.join([*left, *weights][:5])}")
    # only parameters, not buffers: in bf16 the frequencies of the time encoding would change
    widest = reduce(torch.promote_types, (weight.dtype for weight in model.parameters()))
    for weight in theirs.parameters():
        weight.data = weight.data.to(widest)
    return theirs.eval()


def _refuse_adapters(module: NativeModel, doing: str) -> None:
    """Raise if the network has adapters, which `doing` cannot write."""
    if hasattr(module, "peft_config"):
        advice = "merge them first (sparring.policies.lora.merge), or save only the adapters (save_adapters)"
        raise UserError(f"{doing}: this network has LoRA adapters; {advice}")


def _names(sizes: Sizes) -> dict[str, tuple[str, ...]]:
    vision, language = "model.vlm.vision_tower", "model.vlm.language_model"
    names: dict[str, tuple[str, ...]] = {
        "vision.places": (f"{vision}.embeddings.position_embedding.weight",),
        "words.weight": (f"{language}.embed_tokens.weight",),
        "trunk_norm.weight": (f"{language}.norm.weight",),
        "expert_norm.weight": ("model.dit.norm.weight",),
    }
    linear = {"vision.patches": f"{vision}.embeddings.patch_embedding", "vision.norm": f"{vision}.post_layernorm"}
    linear["projector"] = "model.vlm.multi_modal_projector.linear"
    inputs = {"state_in": "state_proj", "action_in": "action_in_proj"}
    inputs |= {"time_in": "action_time_mlp_in", "time_out": "action_time_mlp_out"}
    linear |= {ours: f"embed_action_time.{theirs}" for ours, theirs in inputs.items()}
    linear["action_out"] = "action_out_proj"
    names |= {ours + end: (theirs + end,) for ours, theirs in linear.items() for end in _BOTH}
    for number in range(sizes.vision_layers):
        names |= _layer(f"vision.blocks.{number}", f"{vision}.encoder.layers.{number}", _VISION_LAYER, _BOTH)
    for number in range(sizes.layers):
        names |= _layer(f"trunk.{number}", f"{language}.layers.{number}", _LAYER, (".weight",))
        names |= _layer(f"expert.{number}", f"model.dit.layers.{number}", _LAYER, (".weight",))
    return names


def _unwrapped(name: str) -> str:
    """Remove the name of the wrapper that some versions put around the vision tower."""
    return name.replace(".vision_model.", ".")


def _layer(ours: str, theirs: str, parts: dict, ends: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {
        f"{ours}.{part}{end}": tuple(f"{theirs}.{name}{end}" for name in names)
        for part, names in parts.items()
        for end in ends
    }


def _sizes(config: Any) -> Sizes:
    vision, text, action = config.vlm_config.vision_config, config.vlm_config.text_config, config.dit_config
    _check_values("vision_config", vision, _FIXED_VISION)
    _check_values("text_config", text, _FIXED)
    _check_values("dit_config", action, _FIXED)
    _check_values("config", config, _FIXED_TIME)
    for part in (text, action):
        _check_values("rope_parameters", SimpleNamespace(**part.rope_parameters), _FIXED_ROPE)
    shared = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    _check_values("dit_config", action, {name: getattr(text, name) for name in shared})
    parts = ((vision, _VISION_SIZES), (text, _TEXT_SIZES), (action, _ACTION_SIZES), (config, _OWN_SIZES))
    return Sizes(**{ours: getattr(part, theirs) for part, names in parts for ours, theirs in names.items()})


def _check_values(section: str, config: Any, expected: dict) -> None:
    for name, value in expected.items():
        given = getattr(config, name)
        if given != value:
            raise UserError(f"pi0's {section}.{name} is {given}, expected {value}: this model cannot be converted")


def _settings_of(sizes: Sizes) -> dict:
    def named(names: dict[str, str]) -> dict[str, int]:
        return {theirs: getattr(sizes, ours) for ours, theirs in names.items()}

    text = {"model_type": "gemma", **named(_TEXT_SIZES)}
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False, **named(_VISION_SIZES)}
    vlm = {"model_type": "paligemma", "text_config": text, "vision_config": vision, "projection_dim": sizes.width}
    vlm |= {"image_token_id": sizes.vocabulary, "hidden_size": sizes.width}  # a token outside the vocabulary
    # the action expert has the layers and heads of the text model
    return {"vlm_config": vlm, "dit_config": {**text, **named(_ACTION_SIZES)}, **named(_OWN_SIZES)}
