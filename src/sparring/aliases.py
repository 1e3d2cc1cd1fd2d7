"""Other spellings of dotted keys, mostly those of the documents this system comes from. Torch-free.

docs/from-the-originals.md says where each is from.
"""

from sparring.algorithms.configs import GRPOConfig, PPOConfig
from sparring.collect.configs import RolloutConfig

ALIASES = {
    "task_name": "env.task",
    "cameras": "env.cameras",
    "pretrained_policy_path": "pretrained",
    "output_dir": "output",
    "training.device": "device",
    "teacher.output_dir": "output",
    "teacher_checkpoint": "student.teacher",
    "teacher_path": "student.teacher",
    # `rewards=original` is a preset
    "rewards": "rewards.name",
    "num_envs": "rollout.n_envs",
    "rl_training.num_epochs": "training.iterations",
    "trainer.iterations": "training.iterations",
    "trainer.buffer_size": "buffer.size",
    "trainer.buffer_type": "buffer.type",
    "buffer_size": "buffer.size",
    "buffer_type": "buffer.type",
    "algorithm.name": "algorithm",
    "algorithm.cfg.learning_rate": "ppo.policy_lr",
    "algorithm.cfg.n_epochs": "ppo.ppo_epochs",
    "algorithm.cfg.batch_size": "ppo.mini_batch_size",
    "batch_size": "ppo.mini_batch_size",
    "learning_rate": "ppo.policy_lr",
    "training.batch_size": "ppo.mini_batch_size",
    "training.learning_rate": "ppo.policy_lr",
    "training.steps_per_episode": "rollout.max_episode_steps",
    "steps_per_episode": "rollout.max_episode_steps",
    "n_epochs": "ppo.ppo_epochs",
    "environment.control_mode": "env.control_mode",
    "environment.task": "env.task",
    # pydantic keeps the name `model_config` to itself; a dot at the end: and all below it
    "policy.model_config": "policy.model_settings",
    "policy.model_config.": "policy.model_settings.",
    "policy.vla_config.model_config": "policy.model_settings",
    "policy.vla_config.model_config.": "policy.model_settings.",
    "policy.vla_config.": "policy.",
    **{
        f"{section}.{key}": f"ppo.{key}"
        for section in ("rl_training.ppo_trainer", "algorithm.cfg")
        for key in PPOConfig.model_fields
    },
    **{f"rl_training.rollout_collector.{key}": f"rollout.{key}" for key in RolloutConfig.model_fields},
}
# words that mean something else with grpo
_GRPO_NAMES = {f"ppo.{name}": f"grpo.{name}" for name in GRPOConfig.model_fields} | {"ppo.ppo_epochs": "grpo.epochs"}
GRPO_ALIASES = {
    alias: _GRPO_NAMES[key]
    for alias, key in ALIASES.items()
    if key in _GRPO_NAMES and not alias.startswith("rl_training.ppo_trainer.")
}
# words that mean something else where there is no RL
PHASE_ALIASES = {
    phase: {
        f"{prefix}{key}": f"{phase}.{key}" for prefix in ("", "training.") for key in ("batch_size", "learning_rate")
    }
    for phase in ("imitate", "teacher", "adversarial")
}
PHASE_ALIASES["adversarial"] |= {
    "teacher_checkpoint": "adversarial.teacher",
    "teacher_path": "adversarial.teacher",
    "student_checkpoint": "adversarial.student",
    "student_path": "adversarial.student",
}
PHASE_ALIASES["teacher"] |= {f"{prefix}sequential_training": "teacher.sequential" for prefix in ("", "training.")}
