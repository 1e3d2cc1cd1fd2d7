"""How large a native VLA is. Torch-free."""

from dataclasses import dataclass, fields, replace

from sparring.errors import UserError
from sparring.policies.native_configs import NativeVLAConfig


@dataclass(frozen=True)
class Sizes:
    """Everything that the shapes of the weights follow from; each is a key of the `policy` section."""

    image_size: int
    patch_size: int
    vision_width: int
    vision_layers: int
    vision_heads: int
    vision_mlp: int
    vocabulary: int
    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    expert_width: int
    expert_mlp: int
    max_state_dim: int = 32
    max_action_dim: int = 32
    memory_size: int = 0

    def __post_init__(self):
        for name, size in vars(self).items():
            if type(size) is not int or size < (name != "memory_size"):
                raise UserError(f"policy.{name}={size!r}: expected a whole number above 0")
            if size % 2 and name in ("head_dim", "expert_width"):
                raise UserError(f"policy.{name}={size}: expected an even number")
        for whole, part in (("vision_width", "vision_heads"), ("image_size", "patch_size"), ("heads", "kv_heads")):
            if getattr(self, whole) % getattr(self, part):
                raise UserError(
                    f"policy.{whole}={getattr(self, whole)} cannot be split into policy.{part}={getattr(self, part)}; "
                    "make the first a multiple of the second"
                )


PRESETS = {
    "tiny": Sizes(
        image_size=64,
        patch_size=16,
        vision_width=128,
        vision_layers=2,
        vision_heads=4,
        vision_mlp=256,
        vocabulary=258,
        width=128,
        mlp=256,
        layers=2,
        heads=4,
        kv_heads=1,
        head_dim=32,
        expert_width=128,
        expert_mlp=256,
        max_state_dim=128,
    ),
    "small": Sizes(
        image_size=128,
        patch_size=16,
        vision_width=384,
        vision_layers=12,
        vision_heads=6,
        vision_mlp=1536,
        vocabulary=258,
        width=512,
        mlp=2048,
        layers=12,
        heads=8,
        kv_heads=1,
        head_dim=64,
        expert_width=256,
        expert_mlp=1024,
        max_state_dim=128,
    ),
    "pi0": Sizes(
        image_size=224,
        patch_size=14,
        vision_width=1152,
        vision_layers=27,
        vision_heads=16,
        vision_mlp=4304,
        vocabulary=257152,
        width=2048,
        mlp=16384,
        layers=18,
        heads=8,
        kv_heads=1,
        head_dim=256,
        expert_width=1024,
        expert_mlp=4096,
    ),
}


def sizes_of(config: NativeVLAConfig) -> Sizes:
    """The preset's, where the config gives none of its own."""
    return replace(PRESETS[config.preset], memory_size=config.memory_size, **_given(config))


def sizes_of_checkpoint(config: NativeVLAConfig, saved: Sizes) -> Sizes:
    """Those of the weights. Only a memory may be new."""
    wrong = {name: size for name, size in _given(config).items() if size != getattr(saved, name)}
    if wrong:
        told = ", ".join(f"policy.{name}={size} (there {getattr(saved, name)})" for name, size in wrong.items())
        raise UserError(f"{told}: not the sizes of the weights in policy.model_path={config.model_path}; leave it out")
    if saved.memory_size not in (0, config.memory_size):
        raise UserError(
            f"policy.memory_size={config.memory_size}, but the weights in policy.model_path={config.model_path} read "
            f"{saved.memory_size} numbers of memory; set that"
        )
    return replace(saved, memory_size=config.memory_size)


def _given(config: NativeVLAConfig) -> dict[str, int]:
    given = {field.name: getattr(config, field.name) for field in fields(Sizes) if field.name != "memory_size"}
    return {name: size for name, size in given.items() if size is not None}
