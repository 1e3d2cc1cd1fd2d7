"""Which settings of a flow policy go together. Torch-free."""

from sparring.errors import UserError
from sparring.policies.configs import OF_DENOISING_MDP, FlowConfig


def check(config: FlowConfig, spec, chunk: int) -> None:
    """Refuses what cannot be, and settings that the method does not read."""
    if spec.discrete_actions:
        raise UserError("policy.name=flow draws continuous actions, but the env takes one of several; use actor_critic")
    if config.horizon is not None and config.horizon < chunk:
        raise UserError(
            f"policy.horizon={config.horizon} is shorter than the {chunk} steps that rollout.action_steps executes"
        )
    if config.method != "denoising_mdp":
        fields = FlowConfig.model_fields
        unread = [name for name in OF_DENOISING_MDP if getattr(config, name) != fields[name].default]
        if unread:
            given = ", ".join(f"policy.{name}={getattr(config, name)}" for name in unread)
            raise UserError(
                f"{given}: only policy.method=denoising_mdp reads it, not {config.method}; leave it out, or set that "
                "method"
            )
    _check_noise(config)
    if config.denoising_steps is not None and config.denoising_steps > config.sampling_steps:
        raise UserError(
            f"policy.denoising_steps={config.denoising_steps} is more than the policy.sampling_steps="
            f"{config.sampling_steps} that there are"
        )
    if config.width % config.heads:
        raise UserError(f"policy.width={config.width} cannot be split over policy.heads={config.heads}")


def _check_noise(config: FlowConfig) -> None:
    low, high = config.noise_range
    if not 0 < low < high:
        raise UserError(f"policy.noise_range={[low, high]}: expected 0 < least < most")
    read, unread = ("noise_range", "noise_level") if learns_noise(config) else ("noise_level", "noise_range")
    value, default = getattr(config, unread), FlowConfig.model_fields[unread].default
    if value != default:
        value, default = (list(each) if isinstance(each, tuple) else each for each in (value, default))
        method = f"policy.method={config.method}"
        method += f" with policy.kernel={config.kernel}" if config.method == "denoising_mdp" else ""
        raise UserError(
            f"policy.{unread}={value}: {method} reads policy.{read} instead; leave it at {default}, or set another "
            "method"
        )


def learns_noise(config: FlowConfig) -> bool:
    return config.method == "flow_noise" or (config.method == "denoising_mdp" and config.kernel == "noise")
