"""The name of each metric in the files of a run, and its meaning. docs/metrics.md says the same (a test compares)."""

# all values: (name in a group, meaning); plain keys of episode_metrics.jsonl, which TensorBoard and W&B show in groups
FLAT = {
    "episode": ("rollout/episodes", "Episodes that have ended so far, of all processes."),
    "avg_loss": ("train/loss", "What is minimised; in adversarial the explorer's."),
    "avg_acc": ("train/accuracy", "What this phase gets right, see below; null where nothing can be."),
    "episode_reward": (
        "rollout/episode_reward",
        "Reward of the episodes that ended; explorers': their pay; teacher's: accuracy summed over an episode.",
    ),
    "total_steps": ("rollout/env_steps", "Env steps so far, of all robots and processes."),
    "lr": ("train/lr", "Learning rate; in adversarial the explorer's."),
    "update": ("train/update", "Updates so far; the step of TensorBoard and W&B."),
}

# name in phases and algorithms -> name in files
NAMES = {
    "episode_length": ("rollout/episode_length", "Env steps of the episodes that ended."),
    "success_rate": ("rollout/success_rate", "Share of the episodes that ended that were successes."),
    "contact_share": ("rollout/contact_share", "Share of an episode's decisions in touch with an object."),
    "valid_fraction": ("rollout/valid_fraction", "Share of a rollout's decisions that are of whole episodes."),
    "policy_loss": ("train/policy_loss", "Clipped policy loss, over the minibatches of an update."),
    "value_loss": ("train/value_loss", "Squared error of the critic, before its coefficient."),
    "entropy": ("train/entropy", "Entropy of a decision, in nats; above 0 it is wide, below it is narrow."),
    "approx_kl": ("train/approx_kl", "KL from the policy that acted to the one that learns, in nats."),
    "clip_fraction": ("train/clip_fraction", "Share of the probability ratios that were clipped."),
    "explained_variance": (
        "train/explained_variance",
        "1: the critic foresaw every return; 0: it did no better than their mean.",
    ),
    "reference_kl": ("train/reference_kl", "KL to the policy as it was in the beginning, where kl_coef is set."),
    "grad_norm": ("train/grad_norm", "Norm of the gradient before it is clipped."),
    "gradient_steps": ("train/gradient_steps", "Gradient steps of an update; fewer where target_kl stops it."),
    "steps_skipped": ("train/steps_skipped", "Gradient steps that were NaN or infinite and left out of an update."),
    "advantage_mean": ("train/advantage_mean", "Mean advantage of the decisions, before any normalisation."),
    "advantage_std": ("train/advantage_std", "Standard deviation of these advantages."),
    "return_mean": ("train/return_mean", "Mean return, which the critic is to foresee; PPO only."),
    "return_std": ("train/return_std", "Standard deviation of these returns; PPO only."),
    "groups_dropped": ("train/groups_dropped", "Groups of GRPO all of whose episodes earned the same."),
    "parity": ("train/parity", "The parity gate: largest drift between acting and scoring, in sigmas."),
    "parity_ratio": ("train/parity_ratio", "Largest distance of a ratio of probabilities from 1 there."),
    "parity_skipped": ("train/parity_skipped", "Share of stale decisions of which the gate saw no sample."),
    "ess": ("train/ess", "Effective sample size: the share of its decisions an update is worth; 1: all fresh."),
    "weight_mean": ("train/weight_mean", "Mean weight of stale decisions, before any cap."),
    "weight_max": ("train/weight_max", "Largest of these weights."),
    "weight_masked": ("train/weight_masked", "Share of these weights that are past the cap."),
    "error_loss": ("train/error_loss", "Imitation: squared error of the mean action."),
    "width_loss": ("train/width_loss", "Imitation: how badly the policy's width fits its errors."),
    "cross_entropy_loss": ("train/cross_entropy_loss", "Imitation: of demonstrated discrete actions, in nats."),
    "flow_matching": ("train/flow_matching", "Imitation: squared error of a flow policy's velocity."),
    "consistency": ("train/consistency", "Imitation: how far long steps are from short ones in a row."),
    "imitation": ("train/imitation", "Imitation: the loss that a VLA model brings itself."),
    "negative_log_prob": ("train/negative_log_prob", "Imitation: of demonstrated actions, in nats."),
    "accuracy": ("world_model/accuracy", "Share of tokens foretold, in the windows that were learned from."),
    "accuracy_copy": ("world_model/accuracy_copy", "The same by copying the last frame: a still scene flatters."),
    "accuracy_changed": ("world_model/accuracy_changed", "The same of tokens that copying does not foretell."),
    "fresh_acc": ("world_model/fresh_accuracy", "Share of tokens foretold of what has just been seen first."),
    "wm_accuracy": ("world_model/fresh_accuracy", "Share of tokens foretold of what has just been seen first."),
    "wm_error": ("world_model/fresh_error", "Cross-entropy of what has just been seen first, nats a token."),
    "wm_disagreement": ("world_model/disagreement", "How far the world model's members are apart there."),
    "wm_loss": ("world_model/loss", "The world model's loss in adversarial; in teacher it is avg_loss."),
    "wm_lr": ("world_model/lr", "The world model's learning rate in adversarial; in teacher it is lr."),
    "wm_grad_norm": ("world_model/grad_norm", "Norm of the world model's gradient in adversarial."),
    "wm_steps_skipped": (
        "world_model/steps_skipped",
        "World model's gradient steps that were NaN or infinite and left out, in adversarial.",
    ),
    "loss_tokenizer": ("world_model/loss_tokenizer", "Of the tokenizer, which learns first."),
    "loss_tokens": ("world_model/loss_tokens", "Cross-entropy of the next frame's tokens, nats a token."),
    "loss_pictures": ("world_model/loss_pictures", "Of what its predictions look like."),
    "loss_state": ("world_model/loss_state", "Squared error of how the state changes, normalised."),
    "loss_reward": ("world_model/loss_reward", "Squared error of the env's reward, normalised."),
    "loss_terminated": ("world_model/loss_terminated", "Cross-entropy of whether the episode ends."),
    "loss_success": ("world_model/loss_success", "Cross-entropy of whether it is a success."),
    "generations_error_then": (
        "world_model/generations_error_then",
        "Error on earlier explorers' episodes when they were played.",
    ),
    "generations_error_now": (
        "world_model/generations_error_now",
        "Error on the same episodes now: what was learned and not forgotten.",
    ),
    "steps_per_second": ("perf/steps_per_second", "Env steps of all processes in a second of an update."),
    "collect_seconds": ("perf/collect_seconds", "Collecting a rollout."),
    "simulate_seconds": ("perf/simulate_seconds", "Simulating, as part of collecting."),
    "infer_seconds": ("perf/infer_seconds", "Deciding, as part of collecting."),
    "update_seconds": ("perf/update_seconds", "Learning from a rollout, or the gradient steps of an update."),
    "wm_update_seconds": ("perf/world_model_seconds", "The world model's gradient steps in adversarial."),
    "handover_seconds": ("perf/handover_seconds", "The collecting process took weights and gave a rollout."),
    "actor_wait_seconds": ("perf/actor_wait_seconds", "The collecting process waited for weights."),
    "learner_wait_seconds": ("perf/learner_wait_seconds", "The learner waited for a rollout."),
    "actor_idle": ("perf/actor_idle", "Share of its time that the collecting process waited."),
    "learner_idle": ("perf/learner_idle", "Share of its time that the learner waited."),
    "queue_depth": ("perf/queue_depth", "Rollouts that waited when one was taken."),
    "staleness": ("perf/staleness", "Versions that a rollout's weights were behind when it was taken."),
    "staleness_mean": ("perf/staleness_mean", "The same of the decisions of an update, on average."),
    "staleness_max": ("perf/staleness_max", "The same of the oldest decision."),
    "staleness_allowed": ("perf/staleness_allowed", "How far rollouts that begin now may be behind."),
}
# prefix of names that end in a number or a name of one's own -> the group, and the meaning
FAMILIES = {
    "behind_": ("perf/", "`perf/behind_<n>`: share of the rollouts that were so many versions behind."),
    "loss_": ("world_model/", "`world_model/loss_<part>`: other parts of the loss of a world model of your own."),
    "reward/": ("", "`reward/<term>`: mean of a reward term; `reward/<term>_normalized`: as it enters the pay."),
}

# of evaluations.jsonl
EVALUATIONS = {
    "eval/episodes": "Held-out episodes played.",
    "eval/success_rate": "Share of successes of greedy actions; null where the env does not tell.",
    "eval/success_low": "Lower end of its Wilson 95 % interval.",
    "eval/success_high": "Upper end of it.",
    "eval/reward": "Mean reward of an episode.",
    "eval/steps": "Mean env steps of an episode.",
    "eval/<task>/success_rate": "The same of one of several tasks; so its interval, `reward`, `steps`.",
    "eval/sampled_success_rate": "Of sampled actions, where these are shown too; so its interval, `reward`, `steps`.",
    "eval/random_success_rate": "Of uniformly random actions on the same episodes; so its interval, `reward`, `steps`.",
    "eval/accuracy": "World model: share of the next frame's tokens foretold; so `accuracy_changed`, `accuracy_copy`.",
    "eval/cross_entropy": "World model: of the true tokens, nats a token.",
    "eval/<camera>/psnr": "World model: of its predictions, in dB; `psnr_copy`: of copying the last frame.",
    "eval/<camera>/ssim": "World model: structural similarity of its predictions.",
    "eval/<camera>/skill": "World model: 0: no better than copying the last frame; 1: as good as its tokenizer allows. "
    "Not there where the tokenizer itself is no better than copying.",
    "eval/<camera>/changed_mse_ratio": "World model: squared error on changed pixels; copying the last frame is 1.",
    "eval/contact": "Explorer: share of decisions in touch with an object.",
    "eval/random_contact": "The same of the best of the random ones beside it.",
    "eval/voxels": "Explorer: places that a hand was in; `voxels_per_episode`: on average in an episode.",
    "eval/object_voxels": "Explorer: places that objects were brought to; null where the env does not tell.",
    "eval/state_entropy": "Explorer: of the states it was in, in nats.",
}


def file_name(short: str) -> str:
    """The name in files. A name with a group keeps it; an unknown one belongs to a phase of your own."""
    if short in NAMES:
        return NAMES[short][0]
    if "/" in short:
        return short
    group = next((group for prefix, (group, _) in FAMILIES.items() if short.startswith(prefix)), "train/")
    return f"{group}{short}"


def meanings() -> dict[str, str]:
    return {key: meaning for key, (_, meaning) in FLAT.items()} | dict(NAMES.values()) | EVALUATIONS
