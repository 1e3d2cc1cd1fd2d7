"""Rewards of an explorer: named terms, most of them scored by a world model."""

# in the order of the `rewards` section
TERMS = {
    "memory_divergence": "sparring.rewards.terms:MemoryDivergence",
    "memory_change": "sparring.rewards.terms:MemoryChange",
    "prediction_error": "sparring.rewards.terms:PredictionError",
    "prediction_entropy": "sparring.rewards.terms:PredictionEntropy",
    "disagreement": "sparring.rewards.terms:Disagreement",
    "latent_surprise": "sparring.rewards.terms:LatentSurprise",
    "learning_progress": "sparring.rewards.terms:LearningProgress",
    "rnd": "sparring.rewards.terms:RandomNetworkDistillation",
    "task_success": "sparring.rewards.terms:TaskSuccess",
    "task_reward": "sparring.rewards.terms:TaskReward",
}
