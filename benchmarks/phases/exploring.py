"""Shared by the benchmarks of explorers: their config, and the rise of a metric."""

from pathlib import Path

# prefixes of the metrics that are stored for each update
CURVES = ("reward/", "episode_reward", "contact_share", "wm_", "entropy", "explained_variance")


# env steps, 60 updates: with more, explorers of a frozen world model reach fewer voxels and lose contact with objects
# (docs/log.md)
STEPS = 192_000


def explorer_config(teacher: Path, folder: Path, seed: int, changes: list[str], phase: str = "student"):
    from sparring.config.schema import load_config
    from sparring.config.text import parse_overrides

    fixed = [f"phase={phase}", f"{phase}.teacher={teacher}", f"seed={seed}", f"output={folder}"]
    fixed += ["device=cpu", "threads=1", "env.threads=1", f"training.total_timesteps={STEPS}"]
    return load_config(None, parse_overrides([*fixed, *changes]))


def rise(curve: list[dict], name: str, share: float = 0.2) -> dict:
    """Means over the first and over the last updates."""
    values = [point[name] for point in curve if name in point]
    count = max(1, int(len(values) * share))
    return {"first": sum(values[:count]) / count, "last": sum(values[-count:]) / count}
