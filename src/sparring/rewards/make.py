"""From the `rewards` section of a config to its terms."""

import torch

from sparring.resolve import resolve
from sparring.rewards import TERMS
from sparring.rewards.configs import RewardsConfig
from sparring.rewards.term import RewardTerm


def weights_of(config: RewardsConfig) -> dict[str, float]:
    """Term -> weight, of those that count."""
    weights = {
        "memory_divergence": config.memory_divergence,
        "memory_change": config.memory_change,
        "prediction_error": config.prediction_error,
        "prediction_entropy": config.prediction_entropy,
        "disagreement": config.disagreement,
        "latent_surprise": config.latent_surprise,
        "learning_progress": config.learning_progress,
        "rnd": config.rnd,
        "task_success": config.task_success,
        "task_reward": config.task_reward,
    }
    return {name: weight for name, weight in weights.items() if weight}


def make_term(name: str, config: RewardsConfig, spec, chunk: int, device: torch.device) -> RewardTerm:
    return resolve(name, TERMS, "reward term")(config, spec, chunk, device)
