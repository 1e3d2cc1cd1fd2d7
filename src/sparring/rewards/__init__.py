"""Rewards: named reasons to pay an explorer, most of them told by a world model."""

# in the order of the `rewards` section
TERMS = {
    "memory_divergence": "sparring.rewards.memory:MemoryDivergence",
    "memory_change": "sparring.rewards.memory:MemoryChange",
    "prediction_error": "sparring.rewards.foresight:PredictionError",
    "prediction_entropy": "sparring.rewards.foresight:PredictionEntropy",
    "disagreement": "sparring.rewards.foresight:Disagreement",
    "latent_surprise": "sparring.rewards.foresight:LatentSurprise",
    "learning_progress": "sparring.rewards.learned:LearningProgress",
    "rnd": "sparring.rewards.learned:RandomNetworkDistillation",
    "task_success": "sparring.rewards.task:TaskSuccess",
    "task_reward": "sparring.rewards.task:TaskReward",
}
CONFIGS = {
    "default": "sparring.rewards.configs:RewardsConfig",
    "original": "sparring.rewards.configs:OriginalRewardsConfig",
}
