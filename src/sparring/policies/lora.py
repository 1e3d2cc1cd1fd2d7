"""LoRA adapters through peft: W x becomes W x + (lora_alpha / r) B A x, with W frozen and B initially zero."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from sparring.errors import UserError
from sparring.policies.configs import LoraConfig
from sparring.policies.weights import WeightsFit, match_names, match_parameters, name_matches, refuse_code_of_adapters

_ADAPTABLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_WRAPPED = "base_model.model."  # peft's prefix for the names of a wrapped model
_WEIGHTS = "adapter_model.safetensors"
_BASE = ".base_layer."  # peft's name for the original layer inside a layer with adapters
Patterns = Iterable[str]
# a weight of an adapter; the adapter's name ("default") is removed in files
_ADAPTER = re.compile(r"(\blora_(?:embedding_)?[AB])\.default\b")


def adapt(
    module: nn.Module, config: LoraConfig, section: str = "policy", frozen: Patterns = (), critic_parts: Patterns = ()
) -> None:
    """Add adapters to `module` and freeze everything else but `modules_to_save`; with lora_r=0, add none.
    `section`: for error messages. `frozen`: patterns of frozen weights; `critic_parts`: of parts that learn in full."""
    # matched before adapters change the names
    held = match_parameters(module, frozen, f"{section}.frozen")
    if config.lora_r:
        whole = _whole_parts(module, config.modules_to_save, f"{section}.modules_to_save")
        whole = _outermost([*whole, *_whole_parts(module, critic_parts, f"{section}.critic_parts")])
        targets = _targets(module, config.lora_targets, whole, section)
        sizes = {"r": config.lora_r, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout}
        # exact names: peft would also match layers whose names only end like a target
        adapters = _peft().LoraConfig(**sizes, target_modules="|".join(re.escape(name) for name in targets))
        _inject(module, adapters, whole)
    elif unread := config.set_without_rank(dict(config)):
        value = getattr(config, unread[0])
        value = list(value) if isinstance(value, tuple) else value
        raise UserError(f"{section}.{unread[0]}={value} has no effect without LoRA; set {section}.lora_r, e.g. 16")
    for weight in held:
        weight.requires_grad_(False)
    held_ids = set(map(id, held))
    for name, weight in module.named_parameters():
        if id(weight) in held_ids and name.endswith(f"{_BASE}weight"):
            module.get_submodule(name.removesuffix(f"{_BASE}weight")).requires_grad_(False)


def merge(module: nn.Module) -> None:
    """Merge the adapters into their layers, in place: the network has its original structure again."""
    from peft.tuners.lora import LoraLayer

    _adapters(module)
    for name, layer in list(module.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge(safe_merge=True)
            module.set_submodule(name, layer.get_base_layer())
    del module.peft_config


def save_adapters(module: nn.Module, folder: str | Path) -> None:
    """Save only the learned weights, in peft's format, which `PeftModel.from_pretrained(base, folder)` can load."""
    folder = Path(folder)
    # cloned, because the parameters are views of one vector that the optimiser updates
    weights = {_WRAPPED + key: w.detach().cpu().clone().contiguous() for key, w in _learned(module).items()}
    _adapters(module).save_pretrained(folder)
    save_file(weights, folder / _WEIGHTS)


def load_adapters(module: nn.Module, folder: str | Path) -> None:
    """Load adapters of `save_adapters` or peft, strictly; a module without adapters gets matching ones first."""
    folder = Path(folder)
    if not hasattr(module, "peft_config"):
        _adapt_like(module, folder)
    file = folder / _WEIGHTS
    try:
        given = {key.removeprefix(_WRAPPED): w for key, w in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"'{file}' cannot be read as adapters: {error}") from None
    expected = _learned(module)
    fit = WeightsFit.of(expected, given)
    if not fit.exact:
        advice = "use the model, lora_r, lora_targets and modules_to_save that they were trained with"
        raise UserError(f"the adapters in '{folder}' do not fit the model: {fit.sentence}; {advice}")
    with torch.no_grad():
        for key, tensor in given.items():  # not over `expected`: a file may hold only one of two tied weights
            expected[key].copy_(tensor)


def _learned(module: nn.Module) -> dict[str, torch.Tensor]:
    whole = _adapters(module).modules_to_save or ()
    return {
        _ADAPTER.sub(r"\1", key): tensor
        for key, tensor in module.state_dict().items()
        if _ADAPTER.search(key) or _within(key.replace(_BASE, "."), whole)
    }


def _whole_parts(module: nn.Module, patterns: Iterable[str], key: str) -> list[str]:
    """Names of modules and single weights that learn in full, without those inside another one."""
    weights = [name for name, _ in module.named_parameters()]
    names = [name for name, _ in module.named_modules() if name]
    whole = _outermost(match_names([*names, *weights], patterns, key))
    for name in whole:
        if not any(_within(weight, [name]) for weight in weights):
            raise UserError(f"{key}: '{name}' has no weights; remove it")
    return whole


def _outermost(names: list[str]) -> list[str]:
    return [n for n in dict.fromkeys(names) if not any(n.startswith(f"{other}.") for other in names)]


def _within(name: str, parts: Iterable[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def _targets(module: nn.Module, patterns: tuple[str, ...], whole: list[str], section: str) -> list[str]:
    # MultiheadAttention uses the weights of its layers without calling them: adapters there would have no effect
    excluded = tuple(f"{name}." for name, part in module.named_modules() if isinstance(part, nn.MultiheadAttention))
    excluded += tuple(f"{name}." for name in whole)
    kinds = {name: part for name, part in module.named_modules() if name and isinstance(part, _ADAPTABLE)}
    if patterns:
        names = [name for name, _ in module.named_modules() if name]
        selected = [name for name in match_names(names, patterns, f"{section}.lora_targets") if name in kinds]
        # for a pattern that selects a container: only the linear layers in it
        found = [n for n in selected if isinstance(kinds[n], nn.Linear) or any(name_matches(p, n) for p in patterns)]
    else:
        found = [name for name, part in kinds.items() if isinstance(part, nn.Linear)]
    targets = [name for name in found if not f"{name}.".startswith(excluded) and f"{name}.weight" not in whole]
    if not targets:
        given = f"{section}.lora_targets={list(patterns)}" if patterns else f"{section}.lora_r"
        possible = "(Linear, Embedding, Conv; not inside a MultiheadAttention or a part of modules_to_save)"
        advice = f"give other names, or train parts in full with {section}.modules_to_save"
        raise UserError(f"{given}: no selected layer supports adapters {possible}; {advice}")
    return targets


def _inject(module: nn.Module, config: Any, whole: list[str]) -> None:
    if hasattr(module, "peft_config"):
        raise UserError("this network already has LoRA adapters; merge() them first")
    learns = [weight for name, weight in module.named_parameters() if _within(name, whole)]
    module.requires_grad_(False)
    _peft().inject_adapter_in_model(config, module)
    module.train(module.training)  # peft creates adapters in training mode, with dropout on
    config.modules_to_save = whole or None  # set after injection, because peft would copy these parts
    for weight in learns:
        weight.requires_grad_(True)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    # in eval mode torch's encoder layers have a fast path that bypasses their linear layers, and so the adapters
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0
        elif isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False


def _adapt_like(module: nn.Module, folder: Path) -> None:
    if not (folder / "adapter_config.json").is_file():
        raise UserError(f"'{folder}' has no adapter_config.json; give a folder written by save_adapters or peft")
    peft = _peft()
    try:
        saved = peft.PeftConfig.from_pretrained(folder)
    except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        raise UserError(f"the adapter_config.json in '{folder}' cannot be read: {error!r}") from error
    if not isinstance(saved, peft.LoraConfig):
        raise UserError(f"the adapter_config.json in '{folder}' has type {saved.peft_type}, expected LORA")
    refuse_code_of_adapters(folder)
    whole = _whole_parts(module, saved.modules_to_save or (), "modules_to_save")
    saved.modules_to_save, saved.inference_mode = None, False  # peft saves inference_mode=True
    _inject(module, saved, whole)


def _adapters(module: nn.Module):
    adapters = getattr(module, "peft_config", None)
    if adapters is None:
        raise UserError("this network has no LoRA adapters; call adapt() with lora_r > 0 first")
    return adapters["default"]


def _peft():
    try:
        import peft
    except ImportError:
        raise UserError('LoRA needs peft, which is not installed: pip install "sparring[vla]"') from None
    return peft
