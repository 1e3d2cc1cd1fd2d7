"""Parts of a model, told by patterns of their names: which learn, in what dtype, on which device."""

from collections.abc import Mapping

import torch
from torch import nn

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
        self.reader = next((x.device for x in [*args, *kwargs.values()] if isinstance(x, torch.Tensor)), self.device)
        return _moved(args, self.device), _moved(kwargs, self.device)

    def after(self, module, args, output):
        return _moved(output, self.reader)

    def stay(self, fn, recurse=True):
        return None


def _moved(value, device):
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(each, device) for each in value)
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    return value


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise UserError(f"policy.device_map: '{name}' is no device; expected cpu, cuda or cuda:<index>") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"policy.device_map: '{name}', but torch sees {torch.cuda.device_count()} GPUs")
    return device
