"""The name of each metric in the files of a run, and its meaning. A test compares them with docs/metrics.md."""

# plain keys of episode_metrics.jsonl -> (name with a group for TensorBoard and W&B, meaning)
FLAT = {
    "episode": ("rollout/episodes", "Completed episodes so far, over all processes."),
    "avg_loss": ("train/loss", "The minimised loss; in adversarial, the loss of the explorer."),
    "avg_acc": ("train/accuracy", "Accuracy of this phase, see below; null if it has none."),
    "episode_reward": (
        "rollout/episode_reward",
        "Mean reward of the completed episodes; explorers: intrinsic reward; teacher: sum of the accuracy.",
    ),
    "total_steps": ("rollout/env_steps", "Env steps so far, over all robots and processes."),
    "lr": ("train/lr", "Learning rate; in adversarial, that of the explorer."),
    "update": ("train/update", "Updates so far; the step of TensorBoard and W&B."),
}

# short name in phases and algorithms -> (name in files, meaning)
NAMES = {
    "episode_length": ("rollout/episode_length", "Mean env steps of the completed episodes."),
    "success_rate": ("rollout/success_rate", "Share of the completed episodes that succeeded."),
    "contact_share": ("rollout/contact_share", "Share of the decisions in which the robot touches an object."),
    "valid_fraction": ("rollout/valid_fraction", "Share of a rollout's decisions that belong to whole episodes."),
    "policy_loss": ("train/policy_loss", "Clipped policy loss, averaged over the minibatches of an update."),
    "value_loss": ("train/value_loss", "Squared error of the critic, without its coefficient."),
    "entropy": ("train/entropy", "Entropy of a decision, in nats; it can be negative for continuous actions."),
    "approx_kl": (
        "train/approx_kl",
        "Estimated KL divergence (k3) from the policy at the start of the update to the learning policy, in nats; with "
        "correction=none, from the policy that collected the data.",
    ),
    "clip_fraction": ("train/clip_fraction", "Share of the importance ratios that were clipped."),
    "explained_variance": (
        "train/explained_variance",
        "1: the critic predicts every return; 0: no better than predicting their mean.",
    ),
    "reference_kl": ("train/reference_kl", "KL divergence from the policy at the start of the run, if kl_coef is set."),
    "grad_norm": ("train/grad_norm", "Norm of the gradient before clipping."),
    "gradient_steps": ("train/gradient_steps", "Gradient steps of an update; fewer if target_kl stops it."),
    "steps_skipped": (
        "train/steps_skipped",
        "Gradient steps of an update that were skipped because they were NaN or infinite.",
    ),
    "advantage_mean": ("train/advantage_mean", "Mean advantage of the decisions, before normalisation."),
    "advantage_std": ("train/advantage_std", "Standard deviation of these advantages."),
    "return_mean": ("train/return_mean", "Mean return, the target of the critic; PPO only."),
    "return_std": ("train/return_std", "Standard deviation of these returns; PPO only."),
    "groups_dropped": (
        "train/groups_dropped",
        "Number of dropped GRPO groups, in which all episodes have the same reward.",
    ),
    "parity": ("train/parity", "Parity gate: largest drift between acting and scoring, in standard deviations."),
    "parity_ratio": ("train/parity_ratio", "Parity gate: largest distance of an importance ratio from 1."),
    "parity_skipped": (
        "train/parity_skipped",
        "Share of decisions that the parity gate did not check because of staleness.",
    ),
    "ess": ("train/ess", "Effective sample size, as a share of the decisions; 1: all data is on-policy."),
    "weight_mean": ("train/weight_mean", "Mean off-policy weight of stale decisions, before any cap."),
    "weight_max": ("train/weight_max", "Largest of these weights."),
    "weight_masked": ("train/weight_masked", "Share of these weights that exceed the cap."),
    "error_loss": ("train/error_loss", "Imitation: squared error of the mean action."),
    "width_loss": ("train/width_loss", "Imitation: loss of the standard deviation, fitted to the errors of the mean."),
    "cross_entropy_loss": (
        "train/cross_entropy_loss",
        "Imitation: cross-entropy of demonstrated discrete actions, in nats.",
    ),
    "flow_matching": ("train/flow_matching", "Imitation: squared error of a flow policy's velocity."),
    "consistency": (
        "train/consistency",
        "Imitation: squared difference between the velocity of one step to the end and that of two steps.",
    ),
    "imitation": ("train/imitation", "Imitation: the loss defined by a VLA model itself."),
    "negative_log_prob": (
        "train/negative_log_prob",
        "Imitation: negative log-probability of demonstrated actions, in nats.",
    ),
    "accuracy": ("world_model/accuracy", "Share of tokens predicted correctly, in the training windows."),
    "accuracy_copy": (
        "world_model/accuracy_copy",
        "Accuracy of copying the last frame, which is high in a static scene.",
    ),
    "accuracy_changed": ("world_model/accuracy_changed", "Accuracy on the tokens that copying predicts wrongly."),
    "fresh_acc": (
        "world_model/fresh_accuracy",
        "Share of tokens predicted correctly on new data, before training on it.",
    ),
    "wm_accuracy": (
        "world_model/fresh_accuracy",
        "Share of tokens predicted correctly on new data, before training on it.",
    ),
    "wm_error": ("world_model/fresh_error", "Cross-entropy on new data, before training on it, in nats per token."),
    "wm_disagreement": ("world_model/disagreement", "Disagreement of the ensemble members on new data."),
    "wm_loss": ("world_model/loss", "Loss of the world model in adversarial; teacher: see avg_loss."),
    "wm_lr": ("world_model/lr", "Learning rate of the world model in adversarial; teacher: see lr."),
    "wm_grad_norm": ("world_model/grad_norm", "Norm of the world model's gradient in adversarial."),
    "wm_steps_skipped": (
        "world_model/steps_skipped",
        "Skipped gradient steps of the world model in adversarial, which were NaN or infinite.",
    ),
    "loss_tokenizer": ("world_model/loss_tokenizer", "Loss of the tokenizer, which is trained first."),
    "loss_tokens": ("world_model/loss_tokens", "Cross-entropy of the next frame's tokens, in nats per token."),
    "loss_pictures": ("world_model/loss_pictures", "Image loss of the predicted frames."),
    "loss_state": ("world_model/loss_state", "Squared error of the predicted change of the state, normalised."),
    "loss_reward": ("world_model/loss_reward", "Squared error of the predicted reward of the env, normalised."),
    "loss_terminated": ("world_model/loss_terminated", "Cross-entropy of the predicted termination."),
    "loss_success": ("world_model/loss_success", "Cross-entropy of the predicted success."),
    "generations_error_then": (
        "world_model/generations_error_then",
        "Error on held-out episodes of earlier explorers, when they were recorded.",
    ),
    "generations_error_now": (
        "world_model/generations_error_now",
        "Error of the current world model on the same episodes.",
    ),
    "steps_per_second": ("perf/steps_per_second", "Env steps per second, over all processes."),
    "collect_seconds": ("perf/collect_seconds", "Collecting a rollout."),
    "simulate_seconds": ("perf/simulate_seconds", "Simulating, as part of collecting."),
    "infer_seconds": ("perf/infer_seconds", "Running the policy, as part of collecting."),
    "update_seconds": ("perf/update_seconds", "Learning from a rollout; in teacher, the gradient steps of an update."),
    "wm_update_seconds": ("perf/world_model_seconds", "Gradient steps of the world model in adversarial."),
    "handover_seconds": ("perf/handover_seconds", "Loading weights and handing over a rollout in the actor process."),
    "actor_wait_seconds": ("perf/actor_wait_seconds", "Time that the actor process waits for weights."),
    "learner_wait_seconds": ("perf/learner_wait_seconds", "Time that the learner waits for a rollout."),
    "actor_idle": ("perf/actor_idle", "Share of the time that the actor process waits."),
    "learner_idle": ("perf/learner_idle", "Share of the time that the learner waits."),
    "queue_depth": ("perf/queue_depth", "Number of rollouts that are still waiting when the learner takes one."),
    "staleness": ("perf/staleness", "Staleness of a rollout, in policy versions, when the learner takes it."),
    "staleness_mean": ("perf/staleness_mean", "Mean staleness of the decisions of an update."),
    "staleness_max": ("perf/staleness_max", "Staleness of the oldest decision of an update."),
    "staleness_allowed": ("perf/staleness_allowed", "Allowed staleness of the rollout that starts next."),
}
# prefix of names that end in a number or a user-defined name -> (group, meaning)
FAMILIES = {
    "behind_": ("perf/", "`perf/behind_<n>`: share of the rollouts that were n versions behind."),
    "loss_": ("world_model/", "`world_model/loss_<part>`: other parts of the loss of your own world model."),
    "reward/": ("", "`reward/<term>`: mean of a reward term; `reward/<term>_normalized`: as it enters the reward."),
}

# keys of evaluations.jsonl -> meaning
EVALUATIONS = {
    "eval/episodes": "Number of held-out episodes.",
    "eval/success_rate": "Success rate of greedy actions; null if the env does not report success.",
    "eval/success_low": "Lower end of its 95 % Wilson interval.",
    "eval/success_high": "Upper end of the interval.",
    "eval/reward": "Mean reward of an episode.",
    "eval/steps": "Mean env steps of an episode.",
    "eval/<task>/success_rate": "Success rate on one of several tasks; also its interval, `reward`, `steps`.",
    "eval/sampled_success_rate": "Success rate of sampled actions, if evaluated; also its interval, `reward`, `steps`.",
    "eval/random_success_rate": "Success rate of random actions, same episodes; also its interval, `reward`, `steps`.",
    "eval/action_error": "env.name=dataset: root mean squared error of held-out actions, in units of the dataset.",
    "eval/action_error_ratio": "Squared error relative to that of the mean action, averaged over the action's entries; "
    "0: every action is predicted.",
    "eval/<entry>/action_error_ratio": "The same of one entry of the action.",
    "eval/accuracy": "World model: share of tokens predicted correctly; also `accuracy_changed`, `accuracy_copy`.",
    "eval/cross_entropy": "World model: cross-entropy of the true tokens, in nats per token.",
    "eval/<camera>/psnr": "World model: PSNR of its predictions, in dB; `psnr_copy`: PSNR of copying the last frame.",
    "eval/<camera>/ssim": "World model: structural similarity of its predictions.",
    "eval/<camera>/skill": "World model: 0: equal to copying the last frame; 1: as good as its tokenizer allows. "
    "Absent if the tokenizer itself is no better than copying.",
    "eval/<camera>/changed_mse_ratio": "World model: squared error on changed pixels, relative to copying.",
    "eval/contact": "Explorer: share of the decisions in which the robot touches an object.",
    "eval/random_contact": "Contact share of the best random baseline.",
    "eval/voxels": "Explorer: 5 cm voxels that a hand reached; `voxels_per_episode`: mean per episode.",
    "eval/object_voxels": "Explorer: 5 cm voxels that objects were moved to; null if the env does not report them.",
    "eval/state_entropy": "Explorer: entropy of a state entry in bins of 0.1, averaged over the entries, in nats.",
}


def file_name(short: str) -> str:
    """The name in files. A name with a group stays as it is; an unknown name gets the group `train`."""
    if short in NAMES:
        return NAMES[short][0]
    if "/" in short:
        return short
    group = next((group for prefix, (group, _) in FAMILIES.items() if short.startswith(prefix)), "train/")
    return f"{group}{short}"


def meanings() -> dict[str, str]:
    return {key: meaning for key, (_, meaning) in FLAT.items()} | dict(NAMES.values()) | EVALUATIONS
