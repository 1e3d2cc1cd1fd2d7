"""Parts of a model, told by patterns of their names: which learn, in what dtype, on which device."""

from collections.abc import Mapping

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from sparring.errors import UserError
from sparring.policies.patterns import matching

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def dtype_of(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"dtype '{name}' is not known; expected {' or '.join(DTYPES)}")
    return DTYPES[name]


def cast(model: nn.Module, dtype: str) -> None:
    """Frozen weights to `dtype`; those that learn stay in float32, where small steps are not lost."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else dtype_of(dtype))


def rest(model: nn.Module) -> None:
    """Wholly frozen parts act as in evaluation, whatever is done with the others: no dropout, no new statistics."""
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            module.eval()


def place(model: nn.Module, devices: str | Mapping[str, str]) -> None:
    """Move a model; or parts of it, which then stay where they are and are handed what they read."""
    if isinstance(devices, str):
        model.to(_device(devices))
        return
    modules = dict(model.named_modules())
    for pattern, name in devices.items():
        device = _device(name)
        means = matching([n for n in modules if n], [pattern], "policy.device_map")
        # the outermost of them: what is below goes along
        for part in (n for n in means if not any(n.startswith(f"{other}.") for other in means)):
            _pin(modules[part], part, device)


def _pin(module: nn.Module, name: str, device: torch.device) -> None:
    if any(p.requires_grad for p in module.parameters()):
        raise UserError(
            f"policy.device_map: '{name}' learns, and what learns is on the device of the run; freeze it "
            f"(policy.frozen=[{name}]), or leave it out of the map"
        )
    module.to(device)
    elsewhere = _Elsewhere(device)
    module.register_forward_pre_hook(elsewhere.before, with_kwargs=True)
    module.register_forward_hook(elsewhere.after)
    # a later .to() of the whole passes it by
    module._apply = elsewhere.stay


class _Elsewhere:
    """A part on a device of its own: brought what it reads, and its answer taken back to where that came from."""

    def __init__(self, device: torch.device):
        self.device = self.reader = device

    def before(self, module, args, kwargs):
        told = (x.device for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        self.reader = next(told, self.device)
        return _moved((args, kwargs), self.device)

    def after(self, module, args, output):
        return _moved(output, self.reader)

    def stay(self, fn, recurse=True):
        return None


def _moved(values, device: torch.device):
    """In structures of any kind, which come back as the kind they were."""
    return tree_map(
        lambda value: value.to(device) if hasattr(value, "to") else value,
        values,
        is_leaf=lambda value: isinstance(value, TensorDictBase),
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise UserError(f"policy.device_map: '{name}' is no device; expected cpu, cuda or cuda:<index>") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"policy.device_map: '{name}', but torch sees {torch.cuda.device_count()} GPUs")
    return device
