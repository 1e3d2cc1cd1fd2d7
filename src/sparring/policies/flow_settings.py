"""Which settings of a flow policy go together. Torch-free."""

from sparring.errors import UserError
from sparring.policies.configs import OF_DENOISING_MDP, DenoisingConfig


def check(config: DenoisingConfig, spec, chunk: int) -> None:
    """Refuses what cannot be, and settings that the method does not read."""
    if spec.discrete_actions:
        raise UserError(
            f"policy.name={config.name} draws continuous actions, but the env takes one of several; use actor_critic"
        )
    if config.horizon is not None and config.horizon < chunk:
        raise UserError(
            f"policy.horizon={config.horizon} is shorter than the {chunk} steps that rollout.action_steps executes"
        )
    if config.method != "denoising_mdp":
        fields = DenoisingConfig.model_fields
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


def _check_noise(config: DenoisingConfig) -> None:
    low, high = config.noise_range
    if not 0 < low < high:
        raise UserError(f"policy.noise_range={[low, high]}: expected 0 < least < most")
    read, unread = ("noise_range", "noise_level") if learns_noise(config) else ("noise_level", "noise_range")
    value, default = getattr(config, unread), DenoisingConfig.model_fields[unread].default
    if value != default:
        value, default = (list(each) if isinstance(each, tuple) else each for each in (value, default))
        method = f"policy.method={config.method}"
        method += f" with policy.kernel={config.kernel}" if config.method == "denoising_mdp" else ""
        raise UserError(
            f"policy.{unread}={value}: {method} reads policy.{read} instead; leave it at {default}, or set another "
            "method"
        )


def learns_noise(config: DenoisingConfig) -> bool:
    return config.method == "flow_noise" or (config.method == "denoising_mdp" and config.kernel == "noise")
