"""The `policy` section: one config class per kind of policy. Torch-free."""

from typing import Annotated, Literal

from pydantic import Field

from sparring.config import Section

PositiveInt = Annotated[int, Field(gt=0)]


class EncoderConfig(Section):
    """How observations become features; part of every policy's section."""

    channels: tuple[PositiveInt, ...] = Field((32, 64, 64), description="channels of the image encoder's convolutions")
    image_features: int = Field(256, gt=0, description="features the image encoder gives to actor and critic")
    normalize_observations: bool = Field(
        True, description="mean/std of observation/state, kept with the weights: running, or of the demonstrations"
    )


class CriticConfig(Section):
    """The value network; part of every policy's section."""

    hidden: tuple[PositiveInt, ...] = Field((64, 64), description="widths of the hidden layers of actor and critic")
    activation: Literal["tanh", "relu", "elu", "silu"] = Field("tanh", description="between hidden layers")


class ActorCriticConfig(EncoderConfig, CriticConfig):
    """MLP actor-critic on state, with a CNN in front where the env has cameras."""

    name: str = Field("actor_critic", description="which policy: actor_critic, flow, or your.module:Class")
    distribution: Literal["auto", "gaussian", "squashed", "gsde", "discrete"] = Field(
        "auto", description="auto: discrete where the env's actions are, else gaussian; gsde: smooth exploration"
    )
    sde_sample_freq: int = Field(4, gt=0, description="decisions over which gsde keeps its exploration direction")
    init_std: float = Field(0.6, gt=0, le=5, description="standard deviation of a fresh gaussian policy")
    normalize_actions: bool = Field(
        False, description="gaussian, gsde: think in actions that are scaled as the demonstrations' are"
    )
