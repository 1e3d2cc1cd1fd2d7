"""Keys of the original projects: their names here, and renaming of settings. A key that ends with a dot stands for all
keys below it. docs/from-the-originals.md lists the source of each key. Torch-free."""

from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from sparring import phases
from sparring.algorithms.configs import GRPOConfig, PPOConfig
from sparring.collect.configs import RolloutConfig
from sparring.config.section import Schema
from sparring.config.text import Setting, is_of_hydra, value_text
from sparring.phases import CHAIN


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


_PPO_SYNONYMS = _pairs("""
learning_rate=policy_lr value_lr=critic_lr n_epochs=ppo_epochs batch_size=mini_batch_size clip_coef=clip_ratio
clip_epsilon=clip_ratio clip_range=clip_ratio ent_coef=entropy_coef vf_coef=value_loss_coef
value_coef=value_loss_coef critic_warmup_rollouts=critic_warmup_updates
""")
_PPO_NAMES = {name: name for name in PPOConfig.model_fields} | _PPO_SYNONYMS
_LORA = _pairs("r=lora_r lora_alpha=lora_alpha lora_dropout=lora_dropout target_modules=lora_targets")
_LORA |= {"modules_to_save": "modules_to_save"}
# original key -> our key; `rewards=original` is a preset, and pydantic reserves the name `model_config`
ALIASES = _pairs("""
task_name=env.task cameras=env.cameras pretrained_policy_path=pretrained output_dir=output
teacher_checkpoint=student.teacher teacher_path=student.teacher rewards=rewards.name num_envs=rollout.n_envs
buffer_size=buffer.size buffer_type=buffer.type batch_size=ppo.mini_batch_size learning_rate=ppo.policy_lr
sequential_training=teacher.sequential steps_per_episode=rollout.max_episode_steps n_epochs=ppo.ppo_epochs
training.device=device training.seed=seed training.batch_size=ppo.mini_batch_size
training.learning_rate=ppo.policy_lr training.max_grad_norm=ppo.max_grad_norm
training.scheduler.type=ppo.lr_schedule training.sequential_training=teacher.sequential
training.steps_per_episode=rollout.max_episode_steps training.action_dim=env.pad_action
training.state_dim=env.pad_state training.action_scale=env.action_scale
environment.task_name=env.task environment.data_type.collect_depth=env.depth environment.=env.
trainer.iterations=training.iterations trainer.total_timesteps=training.total_timesteps
trainer.buffer_size=buffer.size trainer.buffer_type=buffer.type trainer.batch_size=ppo.mini_batch_size
trainer.num_envs=rollout.n_envs trainer.rollout_steps=rollout.steps trainer.num_eval_episodes=evaluation.episodes
trainer.seed=seed trainer.device=device trainer.wandb_project_name=logging.project
algorithm.name=algorithm
rl_training.num_epochs=training.iterations rl_training.total_timesteps=training.total_timesteps
rl_training.num_envs=rollout.n_envs
policy.model_config=policy.model_settings policy.model_config.=policy.model_settings.
policy.vla_config.model_config=policy.model_settings policy.vla_config.model_config.=policy.model_settings.
policy.vla_config.=policy.
horizon=policy.horizon n_action_steps=rollout.action_steps policy.n_action_steps=rollout.action_steps
policy._target_=policy.name policy.n_layer=policy.layers policy.n_head=policy.heads policy.n_emb=policy.width
policy.num_inference_steps=policy.sampling_steps policy.use_pc_color=policy.point_channels
policy.encoder_output_dim=policy.point_features
policy.pointcloud_encoder_cfg.out_channels=policy.point_features policy.pointcloud_encoder_cfg.num_points=env.points
optimizer.lr=imitate.learning_rate optimizer.weight_decay=imitate.weight_decay
dataloader.batch_size=imitate.batch_size training.lr_scheduler=imitate.lr_schedule
""")
ALIASES |= {
    **{
        f"policy.{network}.network_cfg.{theirs}": f"policy.{ours}"
        for network in ("actor", "critic")
        for theirs, ours in (("hidden_sizes", "hidden"), ("activation", "activation"))
    },
    **{f"model.lora.{theirs}": f"policy.{ours}" for theirs, ours in _LORA.items()},
    **{
        f"{section}.{theirs}": f"ppo.{ours}"
        for section in ("rl_training.ppo_trainer", "rl_training", "algorithm.cfg")
        for theirs, ours in _PPO_NAMES.items()
    },
    **{f"rl_training.rollout_collector.{key}": f"rollout.{key}" for key in RolloutConfig.model_fields},
    # `<phase>.<any of our keys>` is for that phase only, and overrides the key for all phases
    **{f"{phase}.output_dir": f"{phase}.output" for phase in CHAIN},
    **{f"{phase}.ppo.{theirs}": f"{phase}.ppo.{ours}" for phase in CHAIN for theirs, ours in _PPO_SYNONYMS.items()},
    **_pairs("""
    student.rewards.memory_divergence_weight=student.rewards.memory_divergence
    student.rewards.wm_uncertainty_weight=student.rewards.prediction_error
    adversarial.total_iterations=adversarial.training.iterations adversarial.wm_lr=adversarial.adversarial.learning_rate
    adversarial.explorer_lr=adversarial.ppo.policy_lr adversarial.entropy_weight=adversarial.ppo.entropy_coef
    """),
}
# keys with a different meaning for grpo
_GRPO_NAMES = {f"ppo.{name}": f"grpo.{name}" for name in GRPOConfig.model_fields} | {"ppo.ppo_epochs": "grpo.epochs"}
_GRPO_ALIASES = {
    alias: _GRPO_NAMES[key]
    for alias, key in ALIASES.items()
    if key in _GRPO_NAMES and not alias.startswith("rl_training.ppo_trainer.")
}
# keys with a different meaning in phases without RL
PHASE_ALIASES = {
    phase: {
        f"{prefix}{key}": f"{phase}.{key}" for prefix in ("", "training.") for key in ("batch_size", "learning_rate")
    }
    for phase in ("imitate", "teacher", "adversarial")
}
PHASE_ALIASES["adversarial"] |= {
    f"{run}_{word}": f"adversarial.{run}" for run in ("teacher", "student") for word in ("checkpoint", "path")
}
PHASE_ALIASES["teacher"] |= {f"model.lora.{theirs}": f"world_model.{ours}" for theirs, ours in _LORA.items()}

# the reward terms of an explorer in the originals; prefixes of keys that only their configs with phases have
_ORIGINAL_TERMS = ("rewards.memory_divergence", "rewards.prediction_error")
_PHASED = ("model.", *(f"{phase}." for phase in CHAIN))

# original flag -> our key, and the entry of its list that the flag turns on
LISTED = {
    "environment.camera.collect_head_camera": ("env.cameras", "head"),
    "environment.camera.collect_wrist_camera": ("env.cameras", "wrist"),
    "environment.domain_randomization.random_appearance": ("env.domain_randomization", "appearance"),
    "environment.domain_randomization.random_background": ("env.domain_randomization", "background"),
    "environment.domain_randomization.random_light": ("env.domain_randomization", "light"),
    "environment.domain_randomization.cluttered_table": ("env.domain_randomization", "clutter"),
}

# original keys: why they are not supported, and what to set instead
_REASONS = """\
debug: set logging.console_level=DEBUG instead
model.config_file: describes F1's network; set policy.name and policy.model_path, or world_model.trunk
model.lora.bias: adapters never change biases; remove it
model.lora.task_type: adapters are the same for every task; remove it
environment.need_plan environment.need_planner environment.need_topp: no planner is ever loaded; remove it
environment.embodiment: env.task determines the robot; remove it
environment.single_arm: env.task determines the number of arms; remove it
environment.scene_reset_interval environment.randomize_robot_init environment.num_objects: \
env.task determines the objects, and every episode draws new start states; remove it
environment.delta_qpos_scale: set env.action_scale, a factor of the robot's own scale
environment.render_mode: there is only one renderer of camera images; remove it
environment.camera.: set env.cameras (names) and env.image_size (pixels)
environment.data_type.: states and images are always recorded; remove it
training.weight_decay: only imitate.weight_decay exists; remove it
training.gradient_accumulation_steps: set ppo.micro_batch_size, the decisions per backward pass
training.scheduler.: learning rates decay to 0 over the whole run; remove it
training.n_pred_img_steps: a world model predicts the next frame only; remove it
training.memory_backprop: gradients always pass through training.bptt_length decisions; remove it
training.action_bounds.: actions are within -1 and 1; scale them by env.action_scale
training.video_save_every: videos are saved with checkpoints: set training.save_every
training.sample_save_every: samples are saved with metrics: set training.log_every
adversarial.buffer_size: episodes are stored on disk: set adversarial.max_gb
adversarial.adversarial_weight: each reward term of the explorer has a weight: set rewards.*
adversarial.explorer.: the explorer is the policy: set policy.*
trainer.exp_name: the name of a run is that of its folder: set output
trainer.gym_config: env.* describes the env: set env.name and its settings
trainer.headless: nothing opens a window; remove it
trainer.enable_rt: there is no ray tracing; remove it
trainer.gpu_id: set device=cuda:<index>
trainer.enable_eval: every run ends with an evaluation; set evaluation.every for more of them
trainer.num_eval_envs: the number of robots of an evaluation is not a setting; remove it
trainer.eval_freq rl_training.eval_interval: set evaluation.every, in updates
trainer.save_freq rl_training.save_interval: set training.save_every, in updates
trainer.model_type: set policy.name
trainer.events.: videos are recorded by rollout.render_episodes; set that
algorithm.cfg.rollout_time_first: the order of a rollout is not a setting; remove it
policy.actor. policy.critic.: actor and critic are MLPs: set policy.hidden and policy.activation
rl_training.warmup_steps: set ppo.warmup_updates, in updates
rl_training.log_interval: set training.log_every, in updates
trainer.use_wandb logging.use_wandb wandb. logging.wandb.: \
set logging.mode=online or offline, logging.project, logging.name
trainer.use_swanlab logging.use_swanlab swanlab. logging.swanlab. trainer.swanlab_project_name: \
SwanLab is not supported: set logging.tensorboard=true, or logging.mode=online for W&B
defaults hydra. multi_run.: Hydra joins files and names folders; write all settings in this file, and set output
shape_meta policy.shape_meta: the env determines the shapes; remove it
exp_name: the name of a run is that of its folder: set output
n_obs_steps policy.n_obs_steps dataset_obs_steps: policies read the current observation only; remove it
obs_as_global_cond policy.obs_as_global_cond: observations are the condition of the denoiser; remove it
n_latency_steps keypoint_visible_rate: has no counterpart; remove it
policy.model_name policy.block_type policy.qkv_bias policy.qk_norm policy.pre_norm_modality policy.visual_cond_len: \
describes a transformer with cross-attention to points, but policy.name=flow attends to pooled points; remove it
policy.pointcloud_encoder_cfg.pointwise: features of points are pooled (their maximum); remove it
policy.pointcloud_encoder_cfg. policy.pointnet_type policy.encoder_type: \
the point encoder is a PointNet with layer norms: set policy.point_channels
policy.diffusion_timestep_embed_dim policy.diffusion_target_t_embed_dim: policy.width is the width of all embeddings; \
remove it
policy.flow_batch_ratio policy.consistency_batch_ratio: the consistency term has a weight: set policy.consistency
policy.sample_t_mode_flow policy.sample_t_mode_consistency policy.sample_dt_mode_consistency \
policy.sample_target_t_mode policy.denoise_timesteps: how imitation draws times is not a setting; remove it
policy.use_point_crop policy.crop_shape: set env.points_low and env.points_high, in metres
policy.downsample_points: the env selects points by farthest-point sampling: set env.points
policy.language_conditioned policy.max_lang_cond_len: set policy.language_features
policy.obs_encoder.: describes ManiFlow's image encoder; set policy.image_encoder
ema. training.use_ema: averaged weights have a constant decay: set imitate.ema, e.g. 0.999
dataloader. val_dataloader.: demonstrations are read in this process; remove it
optimizer.: the optimiser is AdamW with its default betas; remove it
checkpoint.: set training.save_every and training.keep_checkpoints
training.lr_warmup_steps: imitation has no warm-up; remove it
training.num_epochs: an update has imitate.steps_per_update gradient steps: set training.iterations
training.gradient_accumulate_every: set imitate.batch_size
training.rollout_every: set evaluation.every, in updates
training.checkpoint_every: set training.save_every, in updates
training.val_every training.sample_every training.max_train_steps training.max_val_steps training.tqdm_interval_sec: \
has no counterpart; remove it
training.distributed training.num_gpus: pass --gpus N
training.env_device: set device
training.resume: set resume
training.debug: set logging.console_level=DEBUG instead
logging.entity logging.tags logging.id logging.group logging.resume: \
W&B reads WANDB_ENTITY, WANDB_TAGS and WANDB_RUN_GROUP, and the run folder stores its id; remove it
"""
_BY_PHASE = "the phase determines what learns and which policy acts; remove it"
_OF_A_PHASE = ("exploration_type", "train_world_model", "train_action_head", "freeze_vision_encoder")
_EXPLAINED = [line.split(": ", 1) for line in _REASONS.splitlines()]
UNSUPPORTED = {key: reason for keys, reason in _EXPLAINED for key in keys.split()}
UNSUPPORTED |= {f"{phase}.{key}": _BY_PHASE for phase in CHAIN for key in _OF_A_PHASE}
ALWAYS = "this is the default or the only behaviour of Sparring"
# unsupported keys -> the value that is always in effect here; any other value is refused
FIXED_VALUES: dict[str, Any] = {"model.lora.bias": "none", "model.lora.task_type": "CAUSAL_LM"}
FIXED_VALUES |= dict.fromkeys(["debug", "trainer.enable_rt", "trainer.use_wandb", "trainer.use_swanlab"], False)
FIXED_VALUES |= dict.fromkeys(["logging.use_wandb", "logging.use_swanlab"], False)
FIXED_VALUES |= {f"environment.{key}": False for key in ("need_plan", "need_planner", "need_topp")}
FIXED_VALUES |= {f"environment.data_type.collect_{what}": True for what in ("rgb", "qpos", "endpose")}
FIXED_VALUES |= dict.fromkeys(["training.memory_backprop", "trainer.headless", "trainer.enable_eval"], True)
FIXED_VALUES |= {"training.n_pred_img_steps": 1, "training.action_bounds.low": -1, "training.action_bounds.high": 1}
FIXED_VALUES |= {"teacher.exploration_type": "random", "student.exploration_type": "policy"}
FIXED_VALUES |= {f"{phase}.train_world_model": phase != "student" for phase in CHAIN}
FIXED_VALUES |= {f"{phase}.train_action_head": phase != "teacher" for phase in CHAIN}
FIXED_VALUES |= dict.fromkeys(["policy.actor.type", "policy.critic.type"], "mlp")
FIXED_VALUES |= dict.fromkeys(["n_obs_steps", "policy.n_obs_steps", "dataset_obs_steps"], 1)
FIXED_VALUES |= {"n_latency_steps": 0, "training.gradient_accumulate_every": 1, "training.debug": False}
FIXED_VALUES |= dict.fromkeys(["obs_as_global_cond", "policy.obs_as_global_cond", "training.resume"], True)
FIXED_VALUES |= {"policy.encoder_type": "DP3Encoder", "policy.pointnet_type": "pointnet"}
FIXED_VALUES |= {"policy.pointcloud_encoder_cfg.use_layernorm": True, "optimizer._target_": "torch.optim.AdamW"}
FIXED_VALUES |= {"policy.pointcloud_encoder_cfg.final_norm": "layernorm", "policy.language_conditioned": False}
# our key, value of the originals -> our value
_VALUES: dict[tuple[str, str | bool], Any] = {
    ("env.task", "random_exploration"): "explore",
    # this flag selects one of two PointNets
    ("policy.point_channels", False): [64, 128, 256],
    ("policy.point_channels", True): [64, 128, 256, 512],
    **{
        ("policy.name", f"maniflow.policy.{module}.{name}"): "flow"
        for module, name in (
            ("maniflow_pointcloud_policy", "ManiFlowTransformerPointcloudPolicy"),
            ("maniflow_image_policy", "ManiFlowTransformerImagePolicy"),
        )
    },
}


@dataclass(frozen=True)
class _Renamed:
    """Settings under our keys, as their phase reads them, and the settings that were not renamed."""

    phase: str
    schema: Schema  # with the aliases of this phase
    settings: list[Setting] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)  # original key -> our key
    fixed: list[Setting] = field(default_factory=list)  # with values of FIXED_VALUES
    other_phases: list[Setting] = field(default_factory=list)
    # those among `settings` that are not supported here, and why
    refused: list[tuple[Setting, str]] = field(default_factory=list)
    # those among `settings` that are not in the file: the originals' rewards of an explorer
    implied: list[Setting] = field(default_factory=list)

    def notes(self) -> list[str]:
        lines = {
            "read as": [f"{theirs} -> {ours}" for theirs, ours in self.keys.items()],
            f"no effect, because {ALWAYS}": [f"{s.key}={value_text(s.value)}" for s in self.fixed],
            "for other phases, not used in this one": [s.key for s in self.other_phases],
        }
        return [f"{title}: {', '.join(keys)}" for title, keys in lines.items() if keys] + self.notes_on_rewards()

    def notes_on_rewards(self) -> list[str]:
        if not self.implied:
            return []
        given = ", ".join(f"{setting.key}={value_text(setting.value)}" for setting in self.implied)
        others = "the other terms have the weights of rewards=original"
        differs = "unlike in the originals, terms are normalised (running mean and standard deviation) before weighting"
        return [f"{self.phase} has the rewards of the originals: {given}; {others}; {differs}"]


def rename(settings: list[Setting], schema: Schema, phase: str | None = None) -> _Renamed:
    """Settings under our keys: each is renamed, has a fixed value, is for another phase, or is left for the schema to
    refuse. `<phase>.<key of any section>` is for that phase only and overrides the key for all phases in the same file.
    `phase`: the phase to read them for; None: the one that they set."""
    phase = phase or next((s.value for s in reversed(settings) if s.key == "phase"), None)
    phase = phases.ALIASES.get(phase, phase) if isinstance(phase, str) else "finetune"
    named = ("algorithm", "algorithm.name", f"{phase}.algorithm")
    algorithm = next((s.value for s in reversed(settings) if s.key in named), None)
    aliases = ALIASES | (_GRPO_ALIASES if algorithm == "grpo" else {}) | PHASE_ALIASES.get(phase, {})
    schema = replace(schema, aliases=aliases)
    renamed = _Renamed(phase, schema)
    for _, group in groupby(settings, lambda setting: setting.source):
        common, own, flags = list[Setting](), list[Setting](), dict[str, list[Setting]]()
        of_file = list(group)
        of_hydra = is_of_hydra(of_file)
        for setting in of_file:
            if setting.key not in schema.root.model_fields and setting.value in (None, {}) and _example(setting.key):
                continue
            if _asks_for_fixed_value(setting):
                renamed.fixed.append(setting)
                continue
            if why := _why_unsupported(setting, of_hydra):
                renamed.refused.append((setting, why))
            owner, key = _owner(setting.key, schema)
            key = _of_own_term(key)
            if owner not in (None, phase):
                renamed.other_phases.append(setting)
                continue
            if setting.key in LISTED and isinstance(setting.value, bool):
                key = LISTED[setting.key][0]
                common += [] if key in flags else [replace(setting, key=key)]
                flags.setdefault(key, []).append(setting)
            else:
                ours = replace(setting, key=key, written=setting.as_written)
                if isinstance(setting.value, str | bool):
                    ours = replace(ours, value=_VALUES.get((key, setting.value), setting.value))
                # its own source: a key for all phases and the same key for one phase may both be given
                own_source: dict[str, Any] = {"source": f"{setting.where}, for {phase}", "line": None} if owner else {}
                (own if owner else common).append(replace(ours, **own_source))
            if key not in (setting.key, _of_own_term(setting.key)):
                renamed.keys[setting.key] = key
            if phase == "finetune" and (setting.key, setting.value) == ("trainer.buffer_type", "vla"):
                # it sets the mode, too; inserted first and with its own source, so that rollout.mode in the file wins
                written = f"{setting.as_written}=vla"
                common.insert(0, Setting("rollout.mode", "async", setting.where, written=written))
                renamed.keys["trainer.buffer_type=vla"] = "rollout.mode=async"
        for number, place in enumerate(common):
            if place.key in flags and place.written is None:
                given = flags[place.key]
                entries = [LISTED[flag.key][1] for flag in given if flag.value]
                common[number] = replace(place, value=entries, written=", ".join(flag.key for flag in given))
        renamed.settings.extend(common + own)
    renamed.implied.extend(_original_rewards(settings, renamed))
    # first, so that given settings override them
    renamed.settings[:0] = renamed.implied
    return renamed


def why_not(key: str, value: Any) -> str | None:
    """Why a key of the originals is not supported, and what to do; None for any other key."""
    if key.endswith("..."):
        return "stands for omitted settings; write them, or remove it"
    reason = _reason(key)
    example = None if reason else _example(key)
    return f"expected keys with values below it, e.g. {example}, not {value_text(value)}" if example else reason


def _original_rewards(settings: list[Setting], renamed: _Renamed) -> list[Setting]:
    """The reward settings implied by a config file of the originals (not by single keys on the command line): their set
    of terms and their formula. If it weights some of the terms for this phase, the others get weight 0; otherwise the
    only term of `adversarial` is the prediction error."""
    # keys that occur only in configs of the originals with teacher, student and adversarial
    theirs = [s for s in settings if s.key.startswith(_PHASED) and (s.key in ALIASES or _reason(s.key))]
    source = next((s.source for s in theirs if s.source != "command line"), None)
    given = {setting.key for setting in renamed.settings}
    if renamed.phase not in ("student", "adversarial") or source is None or "rewards.name" in given:
        return []
    implied: dict[str, Any] = {"rewards.name": "original"}
    if any(key in given for key in _ORIGINAL_TERMS):
        implied |= {key: 0.0 for key in _ORIGINAL_TERMS if key not in given}
    elif renamed.phase == "adversarial":
        implied["rewards.memory_divergence"] = 0.0
    return [Setting(key, value, f"{source}, as in the originals") for key, value in implied.items()]


def _why_unsupported(setting: Setting, of_hydra: bool = False) -> str | None:
    """`of_hydra`: whether its file is a config of Hydra, which names classes."""
    if setting.key.endswith("..."):
        return why_not(setting.key, setting.value)
    if of_hydra and setting.key == "name":
        return "the name of a run is that of its folder: set output"
    if of_hydra and isinstance(setting.value, str) and "${" in setting.value and not _reason(setting.key):
        return "refers to a value that is not in this file; write the value"
    has_place = setting.key in ALIASES or setting.key in LISTED or _asks_for_fixed_value(setting)
    return None if has_place else _reason(setting.key)


def _owner(key: str, schema: Schema) -> tuple[str | None, str]:
    if _reason(key) and key not in ALIASES:
        return None, key
    ours = schema.spelled(key)
    owner, _, rest = ours.partition(".")
    first = rest.partition(".")[0]
    classes = schema.classes() if owner in CHAIN and rest else {}
    if not classes or first in classes[owner].model_fields:
        return None, ours
    rest, keys = schema.spelled(rest), schema.keys(classes)
    is_known = first in schema.root.model_fields or rest in keys or any(k.endswith(f".{rest}") for k in keys)
    return (owner, rest) if is_known else (None, ours)


def _of_own_term(key: str) -> str:
    """rewards.my.module:term -> rewards.terms.my.module:term"""
    rest = key.removeprefix("rewards.")
    return f"rewards.terms.{rest}" if rest != key and ":" in rest and not rest.startswith("terms.") else key


def _asks_for_fixed_value(setting: Setting) -> bool:
    if setting.key not in FIXED_VALUES:
        return False
    value = setting.value
    integer = repr(int(value)) if isinstance(value, float) and value.is_integer() else ""
    return repr(FIXED_VALUES[setting.key]) in (repr(value), integer)  # by repr: 1 == True


def _example(key: str) -> str | None:
    known = (*ALIASES, *LISTED, *UNSUPPORTED)
    return None if key in known else next((k for k in known if k.startswith(f"{key}.") and not k.endswith(".")), None)


def _reason(key: str) -> str | None:
    beginnings = [k for k in UNSUPPORTED if k.endswith(".") and key.startswith(k)]
    return UNSUPPORTED.get(key) or (UNSUPPORTED[max(beginnings, key=len)] if beginnings else None)
