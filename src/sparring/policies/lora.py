"""LoRA through peft: W x becomes W x + (lora_alpha / r) B A x, with W frozen and B zero at the start."""

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
_WRAPPED = "base_model.model."  # how peft names what is inside the model that it wraps
_WEIGHTS = "adapter_model.safetensors"
_BASE = ".base_layer."  # where peft puts the weights of a layer that has adapters
Patterns = Iterable[str]
# a weight of an adapter, and the adapter's name in it, which peft leaves out of files
_ADAPTER = re.compile(r"(\blora_(?:embedding_)?[AB])\.default\b")


def adapt(
    module: nn.Module, config: LoraConfig, section: str = "policy", frozen: Patterns = (), critic_parts: Patterns = ()
) -> None:
    """Puts adapters into `module` and freezes the rest but for `modules_to_save`; no adapters with lora_r=0.
    `section`: where the config is. `frozen`: patterns that do not learn; `critic_parts`: those that learn in full."""
    # by names of the module as it is: adapters change them
    held = match_parameters(module, frozen, f"{section}.frozen")
    if config.lora_r:
        whole = _whole_parts(module, config.modules_to_save, f"{section}.modules_to_save")
        whole = _outermost([*whole, *_whole_parts(module, critic_parts, f"{section}.critic_parts")])
        targets = _targets(module, config.lora_targets, whole, section)
        sizes = {"r": config.lora_r, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout}
        # exact names: the end of a name would select other layers too
        adapters = _peft().LoraConfig(**sizes, target_modules="|".join(re.escape(name) for name in targets))
        _inject(module, adapters, whole)
    elif unread := config.set_without_rank(dict(config)):
        value = getattr(config, unread[0])
        value = list(value) if isinstance(value, tuple) else value
        raise UserError(f"{section}.{unread[0]}={value} is not read without LoRA; set {section}.lora_r, e.g. 16")
    for weight in held:
        weight.requires_grad_(False)
    held_ids = set(map(id, held))
    for name, weight in module.named_parameters():
        if id(weight) in held_ids and name.endswith(f"{_BASE}weight"):
            module.get_submodule(name.removesuffix(f"{_BASE}weight")).requires_grad_(False)


def merge(module: nn.Module) -> None:
    """Adds the adapters to their weights, in place: the network is a plain one again."""
    from peft.tuners.lora import LoraLayer

    _adapters(module)
    for name, layer in list(module.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge(safe_merge=True)
            module.set_submodule(name, layer.get_base_layer())
    del module.peft_config


def save_adapters(module: nn.Module, folder: str | Path) -> None:
    """What learned, alone, in peft's format: `PeftModel.from_pretrained(base, folder)` opens it too."""
    folder = Path(folder)
    # cloned, because an optimiser's parameters are views of one vector
    weights = {_WRAPPED + key: w.detach().cpu().clone().contiguous() for key, w in _learned(module).items()}
    _adapters(module).save_pretrained(folder)
    save_file(weights, folder / _WEIGHTS)


def load_adapters(module: nn.Module, folder: str | Path) -> None:
    """Those that `save_adapters` or peft wrote, strictly; a module that has none yet is adapted as they were."""
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
        advice = "use the model, lora_r, lora_targets and modules_to_save they were made with"
        raise UserError(f"the adapters in '{folder}' do not fit: {fit.sentence}; {advice}")
    with torch.no_grad():
        for key, tensor in given.items():  # of two weights that share their memory, a file may have one alone
            expected[key].copy_(tensor)


def _learned(module: nn.Module) -> dict[str, torch.Tensor]:
    whole = _adapters(module).modules_to_save or ()
    return {
        _ADAPTER.sub(r"\1", key): tensor
        for key, tensor in module.state_dict().items()
        if _ADAPTER.search(key) or _within(key.replace(_BASE, "."), whole)
    }


def _whole_parts(module: nn.Module, patterns: Iterable[str], key: str) -> list[str]:
    """Modules and bare weights that learn in full, without those that are inside of another one of them."""
    weights = [name for name, _ in module.named_parameters()]
    names = [name for name, _ in module.named_modules() if name]
    whole = _outermost(match_names([*names, *weights], patterns, key))
    for name in whole:
        if not any(_within(weight, [name]) for weight in weights):
            raise UserError(f"{key}: '{name}' has no weights that could learn")
    return whole


def _outermost(names: list[str]) -> list[str]:
    return [n for n in dict.fromkeys(names) if not any(n.startswith(f"{other}.") for other in names)]


def _within(name: str, parts: Iterable[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def _targets(module: nn.Module, patterns: tuple[str, ...], whole: list[str], section: str) -> list[str]:
    # a MultiheadAttention reads the weights of its layers without calling them: adapters there would do nothing
    closed = tuple(f"{name}." for name, part in module.named_modules() if isinstance(part, nn.MultiheadAttention))
    closed += tuple(f"{name}." for name in whole)
    kinds = {name: part for name, part in module.named_modules() if name and isinstance(part, _ADAPTABLE)}
    if patterns:
        names = [name for name, _ in module.named_modules() if name]
        selected = [name for name in match_names(names, patterns, f"{section}.lora_targets") if name in kinds]
        # a part that is selected as a whole stands for its linear layers
        found = [n for n in selected if isinstance(kinds[n], nn.Linear) or any(name_matches(p, n) for p in patterns)]
    else:
        found = [name for name, part in kinds.items() if isinstance(part, nn.Linear)]
    targets = [name for name in found if not f"{name}.".startswith(closed) and f"{name}.weight" not in whole]
    if not targets:
        given = f"{section}.lora_targets={list(patterns)}" if patterns else f"{section}.lora_r"
        takes = "(Linear, Embedding, Conv; not within a MultiheadAttention or a part of modules_to_save)"
        advice = f"name others, or have parts learn in full: {section}.modules_to_save"
        raise UserError(f"{given}: there is no layer that takes adapters among these {takes}; {advice}")
    return targets


def _inject(module: nn.Module, config: Any, whole: list[str]) -> None:
    if hasattr(module, "peft_config"):
        raise UserError("this network has LoRA adapters already; merge() them first")
    learns = [weight for name, weight in module.named_parameters() if _within(name, whole)]
    module.requires_grad_(False)
    _peft().inject_adapter_in_model(config, module)
    module.train(module.training)  # adapters are made in training mode, where they drop out
    config.modules_to_save = whole or None  # afterwards: peft would keep a second copy of these parts in the module
    for weight in learns:
        weight.requires_grad_(True)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    # in eval mode torch's own encoder layers take a short cut past their linear layers, and so past the adapters
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0
        elif isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False


def _adapt_like(module: nn.Module, folder: Path) -> None:
    if not (folder / "adapter_config.json").is_file():
        raise UserError(f"'{folder}' has no adapter_config.json; give a folder that save_adapters or peft wrote")
    peft = _peft()
    try:
        saved = peft.PeftConfig.from_pretrained(folder)
    except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        raise UserError(f"the adapter_config.json in '{folder}' cannot be read: {error!r}") from error
    if not isinstance(saved, peft.LoraConfig):
        raise UserError(f"the adapter_config.json in '{folder}' is of {saved.peft_type}, expected LORA")
    refuse_code_of_adapters(folder)
    whole = _whole_parts(module, saved.modules_to_save or (), "modules_to_save")
    saved.modules_to_save, saved.inference_mode = None, False  # peft's files say that adapters no longer learn
    _inject(module, saved, whole)


def _adapters(module: nn.Module):
    adapters = getattr(module, "peft_config", None)
    if adapters is None:
        raise UserError("this network has no LoRA adapters; adapt() it with lora_r > 0 first")
    return adapters["default"]


def _peft():
    try:
        import peft
    except ImportError:
        raise UserError('LoRA needs peft, which is not installed: pip install "sparring[vla]"') from None
    return peft
