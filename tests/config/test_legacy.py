"""Configs in the formats of earlier documents load or are refused with a reason; `config import` converts them."""

import os
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.cli.main import main
from sparring.config import schema
from sparring.config import text as config_text
from sparring.config.convert import import_config
from sparring.config.legacy import ALIASES, FIXED_VALUES, LISTED, PHASE_ALIASES, UNSUPPORTED, _why_unsupported, rename
from sparring.config.schema import SCHEMA
from sparring.config.section import ConfigError
from sparring.config.text import Setting, flatten, read_settings, to_yaml
from sparring.errors import UserError
from sparring.phases import CHAIN, PHASES
from sparring.rewards import TERMS
from sparring.runs.train_all import train_all

# the runs and datasets that these files name do not exist
load_config = partial(schema.load_config, inherit=False)
# the required setting of each phase, which these files lack
REQUIRED = {"imitate": "imitate.demos", "student": "student.teacher", "adversarial": "adversarial.teacher"}
# snippets of the documents: file name -> text, phase, expected settings
TRAINING = "num_episodes: 100\n  steps_per_episode: 50\n  batch_size: 8\n  learning_rate: 1e-4\n  save_every: 50\n"
F1 = f"""training:
  {TRAINING}  log_every: 10
teacher:
  output_dir: "./outputs/teacher_rl"
logging:
  console_level: INFO
  file_level: DEBUG
"""
F1_VALUES = {"training.num_episodes": 100, "rollout.max_episode_steps": 50, "training.log_every": 10}
EMBODICHAIN = """{
  "trainer": {
    "buffer_size": 2048,
    "buffer_type": "standard",  // "standard" or "vla"
    "iterations": 500
  },
  "algorithm": {
    "name": "ppo",
    "cfg": {"learning_rate": 3e-4, "gamma": 0.99, "n_epochs": 10, "batch_size": 64}
  }
}"""
VLA = """{
  "trainer": {"buffer_type": "vla", "buffer_size": 2048},
  "policy": {
    "name": "vla",
    "action_dim": 7,
    "vla_config": {
      "model_path": "checkpoints/pretrained_vla_model.pth",
      "model_class": "vla_models.GPTVLAModel",
      "model_config": {
        "vision_encoder": "resnet50", "language_model": "gpt2-medium", "freeze_vision_encoder": false
      }
    }
  },
  "algorithm": {"name": "ppo", "cfg": {"learning_rate": 1e-5}}
}"""
MANIFLOW = """task_name: stack_d0
pretrained_policy_path: /path/to/checkpoint.ckpt
rl_training:
  num_epochs: 50
  rollout_collector: {n_episodes_per_batch: 32, n_envs: 16, max_episode_steps: 400, render_episodes: 4}
  ppo_trainer:
    clip_ratio: 0.1
    ppo_epochs: 4
    mini_batch_size: 32
    gamma: 0.95
    gae_lambda: 0.9
    entropy_coef: 0.001
    policy_lr: 5e-6
    critic_lr: 1e-4
training: {device: 'cuda:1'}
logging: {mode: disabled}
"""
# keys and values of the public maniflow_pointcloud_policy_metaworld.yaml that matter here
MANIFLOW_PUBLIC = """defaults:
  - task: metaworld_drawer-open
name: train_maniflow_pointcloud_policy
task_name: ${task.name}
shape_meta: ${task.shape_meta}
exp_name: debug
horizon: 16
n_obs_steps: 1
n_action_steps: 8
n_latency_steps: 0
obs_as_global_cond: true
policy:
  _target_: maniflow.policy.maniflow_pointcloud_policy.ManiFlowTransformerPointcloudPolicy
  n_layer: 3
  n_head: 8
  n_emb: 256
  visual_cond_len: 64
  consistency_batch_ratio: 0.25
  encoder_type: DP3Encoder
  encoder_output_dim: 96
  horizon: ${horizon}
  n_action_steps: ${n_action_steps}
  n_obs_steps: ${n_obs_steps}
  num_inference_steps: 10
  shape_meta: ${shape_meta}
  use_pc_color: false
  pointcloud_encoder_cfg:
    out_channels: ${policy.encoder_output_dim}
    num_points: ${policy.visual_cond_len}
    pointwise: true
ema: {power: 0.75}
dataloader: {batch_size: 384, num_workers: 8}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-4, betas: [0.9, 0.95], weight_decay: 1.0e-3}
training: {seed: 42, device: 'cuda:0', lr_scheduler: cosine, num_epochs: 3010, max_train_steps: null}
logging: {mode: offline, name: '${training.seed}', project: ManiFlow}
hydra: {run: {dir: 'data/${now:%Y}_${name}'}}
"""
LOGS = "logging:\n  console_level: %s\n  file_level: %s\n"
SNIPPETS = {
    "f1_teacher.yaml": (
        F1,
        "teacher",
        F1_VALUES
        | {"teacher.batch_size": 8, "teacher.learning_rate": 1e-4, "output": "./outputs/teacher_rl"}
        | {"logging.console_level": "INFO", "logging.file_level": "DEBUG"},
    ),
    # the teacher's output folder applies to the teacher only
    "f1_student.yaml": (F1, "student", F1_VALUES | {"ppo.mini_batch_size": 8, "ppo.policy_lr": 1e-4, "output": None}),
    "f1_adversarial.yaml": (F1, "adversarial", {"adversarial.batch_size": 8, "adversarial.learning_rate": 1e-4}),
    "f1_finetune.yaml": (F1, "finetune", {"ppo.mini_batch_size": 8, "output": None}),
    "control.yaml": ('environment:\n  control_mode: "delta_qpos"\n', "teacher", {"env.control_mode": "delta_qpos"}),
    "log_every.yaml": ("training:\n  log_every: 10\n", "teacher", {"training.log_every": 10}),
    "logs.yaml": (
        LOGS % ("WARNING", "DEBUG") + "  enable_file_logging: true\n",
        "teacher",
        {"logging.console_level": "WARNING", "logging.enable_file_logging": True},
    ),
    "logs_normal.yaml": (LOGS % ("INFO", "DEBUG"), "teacher", {"logging.console_level": "INFO"}),
    "logs_debug.yaml": (LOGS % ("DEBUG", "DEBUG"), "student", {"logging.console_level": "DEBUG"}),
    "logs_production.yaml": (LOGS % ("WARNING", "INFO"), "adversarial", {"logging.file_level": "INFO"}),
    "logs_small.yaml": ('logging:\n  file_level: "INFO"\n', "teacher", {"logging.file_level": "INFO"}),
    "maniflow.yaml": (
        MANIFLOW,
        "finetune",
        {
            "env.task": ["stack_d0"],
            "pretrained": "/path/to/checkpoint.ckpt",
            "training.iterations": 50,
            "rollout.n_episodes_per_batch": 32,
            "rollout.render_episodes": 4,
            "ppo.clip_ratio": 0.1,
            "ppo.ppo_epochs": 4,
            "ppo.critic_lr": 1e-4,
            "device": "cuda:1",
        },
    ),
    "my_config.json": (
        EMBODICHAIN,
        "finetune",
        {
            "buffer.size": 2048,
            "buffer.type": "standard",
            "training.iterations": 500,
            "ppo.policy_lr": 3e-4,
            "ppo.ppo_epochs": 10,
            "ppo.mini_batch_size": 64,
        },
    ),
    "standard.json": ('{"trainer": {"buffer_type": "standard"}}', "finetune", {"buffer.type": "standard"}),
    "async.json": (
        '{"trainer": {"buffer_type": "vla"}}',
        "finetune",
        {"buffer.type": "vla", "rollout.mode": "async"},
    ),
    # a phase with intrinsic rewards has no async mode
    "in_turns.json": (
        '{"trainer": {"buffer_type": "vla"}}',
        "student",
        {"buffer.type": "vla", "rollout.mode": "sync"},
    ),
    "vla.json": (
        VLA,
        "finetune",
        {
            "policy.action_dim": 7,
            "policy.model_class": "vla_models.GPTVLAModel",
            "policy.model_settings.vision_encoder": "resnet50",
            "ppo.policy_lr": 1e-5,
        },
    ),
}
# sections and kinds of settings that the documents name without an example
COMPLETE = """model:
  config_file: f1.yaml
  lora: {r: 8, lora_alpha: 32, target_modules: [q_proj, v_proj], lora_dropout: 0.1, bias: none}
environment:
  task_name: random_exploration
  need_planner: false
  camera: {collect_head_camera: true, collect_wrist_camera: true, head_camera_type: D435}
  domain_randomization: {random_light: true, random_background: false, cluttered_table: true}
training:
  learning_rate: 1e-4
  batch_size: 4
  sequential_training: true
  bptt_length: 16
  scheduler: {type: cosine, T_max: 10000}
  action_bounds: {low: -1.0, high: 1.0}
teacher: {output_dir: outputs/teacher_rl, exploration_type: random}
student:
  rewards: {memory_divergence_weight: 0.5, wm_uncertainty_weight: 0.25}
  ppo: {clip_epsilon: 0.3, entropy_coef: 0.01}
adversarial: {total_iterations: 100, wm_lr: 2e-4, explorer_lr: 3e-4, wm_updates_per_iter: 5, buffer_size: 1000}
debug: false
"""


def required(phase):
    return [Setting(REQUIRED[phase], "x", "here")] if phase in REQUIRED else []


def in_file(tmp_path, text, name):
    path = tmp_path / name
    path.write_text(text)
    return path


def flat(config):
    return flatten(config.dump())


@pytest.mark.parametrize("name", SNIPPETS)
def test_documented_snippets_load(tmp_path, name):
    text, phase, expected = SNIPPETS[name]
    found = flat(load_config(in_file(tmp_path, text, name), required(phase), phase))
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("name", SNIPPETS)
def test_imported_file_loads_like_the_original(tmp_path, name):
    text, phase, _ = SNIPPETS[name]
    file = in_file(tmp_path, text, name)
    written, _ = import_config(file, phase)
    ours = in_file(tmp_path, written, "ours.yaml")
    assert load_config(ours, required(phase)) == load_config(file, required(phase), phase)
    # no key is left to rename
    settings = read_settings(ours)
    assert rename(settings, SCHEMA).notes() == []


def kept(file):
    return [setting for setting in read_settings(file) if not _why_unsupported(setting)]


def without_sections_of(others, config):
    return {key: value for key, value in flat(config).items() if key.partition(".")[0] not in others}


def test_file_for_all_phases_is_imported_for_each_phase(tmp_path):
    # adapters need a network that some phases lack
    text = COMPLETE.replace("r: 8, lora_alpha: 32, target_modules: [q_proj, v_proj], lora_dropout: 0.1, ", "")
    file = in_file(tmp_path, text, "rl_config.yaml")
    written, printed = import_config(file)
    ours = in_file(tmp_path, written, "ours.yaml")
    assert written.startswith(
        "# From rl_config.yaml, by `sparring config import`. For `sparring train all` and each of"
    )
    for phase in CHAIN:
        theirs = load_config(None, [*kept(file), *required(phase)], phase)
        others = set(CHAIN) - {phase}
        mine = load_config(ours, required(phase), phase)
        assert without_sections_of(others, mine) == without_sections_of(others, theirs)
    student = flat(load_config(ours, required("student"), "student"))
    assert (student["rewards.prediction_error"], student["ppo.clip_ratio"], student["ppo.policy_lr"]) == (
        0.25,
        0.3,
        1e-4,
    )
    adversarial = load_config(ours, required("adversarial"), "adversarial")
    # the setting of a phase overrides the common one
    assert (adversarial.adversarial.learning_rate, adversarial.ppo.policy_lr) == (2e-4, 3e-4)
    assert (adversarial.env.cameras, adversarial.env.domain_randomization) == (("head", "wrist"), ("light", "clutter"))
    assert adversarial.env.task == ("explore",)
    # every key becomes a setting, the comment of a setting ("was ..."), or a comment
    for setting in read_settings(file):
        assert setting.key in written or any(f"{s.key}" == setting.key for s in read_settings(ours))
    assert "#   model.config_file: f1.yaml  (line 2: describes F1's network; " in written
    comment = "is now a comment: this is the default or the only behaviour of Sparring"
    assert f"model.lora.bias (from rl_config.yaml line 3) {comment}" in printed


@pytest.mark.parametrize("phase", ["student", "adversarial"])
@pytest.mark.parametrize(
    "text, expected",
    [
        ("rewards: {memory_divergence_weight: 0.5, wm_uncertainty_weight: 0.25}", (0.5, 0.25)),
        ("rewards: {wm_uncertainty_weight: 0.25}", (0.0, 0.25)),
        ("ppo: {clip_epsilon: 0.3}", (1.0, 1.0)),
    ],
)
def test_original_rewards_keep_their_meaning(tmp_path, text, expected, phase):
    file = in_file(tmp_path, f"student:\n  {text}\n", "theirs.yaml")
    written, notes = import_config(file, phase)
    # only student reads weights of student; the original phase 3 rewards prediction errors only
    expected = expected if phase == "student" else (0.0, 1.0)
    for path in (file, in_file(tmp_path, written, "ours.yaml")):
        rewards = load_config(path, required(phase), phase).rewards
        weights = {name: getattr(rewards, name) for name in TERMS}
        assert (weights.pop("memory_divergence"), weights.pop("prediction_error")) == expected
        assert rewards.divergence == "original" and not any(weights.values())
    _, more = schema.configure([*read_settings(file), *required(phase), Setting("phase", phase, "here")], inherit=False)
    for lines in (notes, more):
        (line,) = [line for line in lines if line.startswith(f"{phase} has the rewards of the originals: ")]
        assert "rewards.name=original" in line and "unlike in the originals, terms are normalised" in line
        assert line in notes and f"# {line}.\n" in written


def test_explicit_rewards_override_the_original_ones(tmp_path):
    file = in_file(tmp_path, "student: {rewards: {wm_uncertainty_weight: 0.25}}", "theirs.yaml")
    chosen = [*required("student"), Setting("rewards", "default", "command line")]
    rewards = load_config(file, chosen, "student").rewards
    assert (rewards.disagreement, rewards.prediction_error, rewards.divergence) == (1.0, 0.25, "potential")
    # one legacy key on the command line does not select the original rewards
    word = [*required("student"), Setting("student.rewards.wm_uncertainty_weight", 0.25, "command line")]
    assert load_config(None, word, "student").rewards.disagreement == 1.0


def test_adapter_settings_go_to_the_network_that_learns(tmp_path):
    file = in_file(tmp_path, "model: {lora: {r: 8, lora_alpha: 32, target_modules: [q_proj]}}\n", "lora.yaml")
    student = load_config(file, [*required("student"), Setting("policy.name", "native_vla", "here")], "student")
    assert (student.policy.lora_r, student.policy.lora_alpha, student.policy.lora_targets) == (8, 32, ("q_proj",))
    teacher = load_config(file, [Setting("world_model.trunk", "vla", "here")], "teacher")
    assert (teacher.world_model.lora_r, teacher.world_model.lora_targets) == (8, ("q_proj",))
    with pytest.raises(ConfigError, match=r"^model.lora.r \(from lora.yaml line 1\): .* policy.name=native_vla"):
        load_config(file)


ADAPTERS = """model:
  lora:
    r: 8
    lora_alpha: 32
    target_modules: [q_proj]
training: {batch_size: 4}
"""
POLICIES = "policy.name=vla or policy.name=native_vla or policy.name=pi0"


def test_adapter_settings_without_a_network_become_comments(tmp_path):
    file = in_file(tmp_path, ADAPTERS, "rl_config.yaml")
    written, notes = import_config(file, "teacher")
    ours = in_file(tmp_path, written, "ours.yaml")
    assert load_config(ours).teacher.batch_size == 4
    lines = [
        "#   model.lora.r: 8  (line 3: it would be world_model.lora_r, which needs world_model.trunk)",
        "#   model.lora.lora_alpha: 32  (line 4: it would be world_model.lora_alpha, which needs world_model.trunk)",
        "#   model.lora.target_modules: [q_proj]  (line 5: it would be world_model.lora_targets, which needs "
        "world_model.trunk)",
    ]
    assert written.splitlines()[-3:] == lines
    assert (
        "model.lora.r (from rl_config.yaml line 3) is now a comment: it would be world_model.lora_r, which " in notes[1]
    )
    assert f"(line 3: it would be policy.lora_r, which needs {POLICIES})" in import_config(file, "student")[0]
    both = "in teacher it would be world_model.lora_r, which needs world_model.trunk; in student and adversarial it "
    assert f"{both}would be policy.lora_r, which needs {POLICIES})" in import_config(file, "all")[0]


def test_adapter_settings_are_imported_if_a_network_uses_them(tmp_path):
    file = in_file(tmp_path, ADAPTERS + "policy: {name: native_vla}\n", "f.yaml")
    student = load_config(in_file(tmp_path, import_config(file, "student")[0], "ours.yaml"), required("student"))
    assert (student.policy.lora_r, student.policy.lora_alpha, student.policy.lora_targets) == (8, 32, ("q_proj",))
    # in a chain: a setting of the phases that have the network, a comment for the others
    written, _ = import_config(file, "all")
    chain = in_file(tmp_path, written, "chain.yaml")
    assert load_config(chain, required("adversarial"), "adversarial").policy.lora_r == 8
    assert load_config(chain, phase="teacher").world_model.lora_r == 0
    assert "#   model.lora.r: 8  (line 3: in teacher it would be world_model.lora_r" in written


def test_adapter_settings_without_rank_become_comments(tmp_path):
    file = in_file(tmp_path, "model: {lora: {lora_alpha: 32}}\npolicy: {name: pi0, model_path: x}\n", "f.yaml")
    written, _ = import_config(file, "finetune")
    assert "model.lora.lora_alpha: 32  (line 1: it would be policy.lora_alpha, which needs policy.lora_r)" in written


def test_complete_file_with_adapters_is_imported_for_every_phase(tmp_path):
    file = in_file(tmp_path, COMPLETE, "rl_config.yaml")
    for phase in (*CHAIN, "finetune", "all"):
        written, _ = import_config(file, phase)
        load_config(in_file(tmp_path, written, "ours.yaml"), required(phase), None if phase != "all" else "teacher")
        assert all(setting.key in written for setting in read_settings(file) if setting.key.startswith("model."))


def test_command_line_overrides_phase_settings_of_a_file(tmp_path):
    file = in_file(tmp_path, "student: {ppo: {clip_epsilon: 0.3}}\nppo: {clip_ratio: 0.1}\n", "f.yaml")
    assert load_config(file, required("student"), "student").ppo.clip_ratio == 0.3
    assert load_config(file).ppo.clip_ratio == 0.1
    given = [*required("student"), Setting("ppo.clip_ratio", 0.4, "command line")]
    assert load_config(file, given, "student").ppo.clip_ratio == 0.4


def test_equal_sizes_of_two_networks_are_one_setting(tmp_path):
    text = (
        '{"policy": {"actor": {"type": "mlp", "network_cfg": {"hidden_sizes": [256]}},\n"critic": {"network_cfg": %s}}}'
    )
    file = in_file(tmp_path, text % '{"hidden_sizes": [256]}', "same.json")
    assert load_config(file).policy.hidden == (256,)
    file = in_file(tmp_path, text % '{"hidden_sizes": [64]}', "other.json")
    with pytest.raises(ConfigError, match="is also given in line 1; keep one"):
        load_config(file)


# config -> the beginning of its one-line error
REFUSED = {
    "trainer: {exp_name: x}": "trainer.exp_name (..): the name of a run is that of its folder: set output",
    "trainer: {use_wandb: true}": "trainer.use_wandb (..): set logging.mode=online or offline, logging.project, ",
    "logging: {tags: [x]}": "logging.tags (..): W&B reads WANDB_ENTITY, WANDB_TAGS and WANDB_RUN_GROUP, ",
    "logging: {mode: later}": "logging.mode = later (..): expected one of: online, offline, disabled",
    "swanlab: {project: x}": "swanlab.project (..): SwanLab is not supported: set logging.tensorboard=true, ",
    "environment: {need_plan: true}": "environment.need_plan (..): no planner is ever loaded; remove it",
    "environment: {camera: {collect_head_camera: often}}": "environment.camera.collect_head_camera (..): set env.",
    "trainer: {buffer_typ: vla}": "trainer.buffer_typ (..): unknown key; nearest: buffer.type (one of: standard, vla)",
    "trainer: {buffer_type: ring}": "buffer.type = ring (.., given as trainer.buffer_type): expected one of: ",
    "algorithm: {cfg: {gama: 1}}": "algorithm.cfg.gama (..): unknown key; nearest: ppo.gamma (a number ",
    "training: {batch_size: many}": "ppo.mini_batch_size = many (.., given as training.batch_size): expected an int",
    "trainer: [1, 2]": "trainer (..): expected keys with values below it, e.g. trainer.iterations, not [1, 2]",
    "training: [1]": "training (..): is a section, not a value; its keys are training.total_timesteps, ",
    "model: {lora: 3}": "model.lora (..): expected keys with values below it, e.g. model.lora.r, not 3",
    "teacher: {colored: 1}": "teacher.colored (..): unknown key; nearest: teacher.coloured",
    "trainer: {...}": "trainer.... (..): stands for omitted settings; ",
    "algorithm: {cfg: {gamma: 0.9, ...}}": "algorithm.cfg.... (..): stands for omitted settings; ",
}


@pytest.mark.parametrize("text", REFUSED)
def test_unsupported_settings_are_refused(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        load_config(in_file(tmp_path, text, "f.yaml"))
    (line,) = caught.value.problems
    assert line.startswith(REFUSED[text].replace("..)", "from f.yaml line 1)").replace("(..,", "(from f.yaml line 1,"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "config file 'FILE' is empty; expected the settings to import"),
        ("- 1\n", "config file 'FILE' line 1: expected keys with values at the top level"),
        ("a: [1,\n", "config file 'FILE' line 2: not valid YAML or JSON"),
        ("phase: 7\n", "phase = 7: unknown phase; expected one of: finetune, "),
        ("trainer: {buffer_typ: vla}", "trainer.buffer_typ (from f.yaml line 1): unknown key; nearest: buffer.type"),
        ("training: {num_episodes: x}", "training.num_episodes = x (from f.yaml line 1): expected an integer > 0"),
    ],
)
def test_failed_import_writes_no_file(tmp_path, monkeypatch, capsys, text, message):
    monkeypatch.chdir(tmp_path)
    file = in_file(tmp_path, text, "f.yaml")
    assert main(["config", "import", str(file), "--output", "ours.yaml"]) == 2
    assert capsys.readouterr().err.startswith(f"sparring: {message.replace('FILE', str(file))}")
    assert os.listdir(tmp_path) == ["f.yaml"]


def test_import_writes_a_file_and_prints_renames(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    in_file(tmp_path, "trainer: {num_envs: 4, exp_name: mine}\n", "f.yaml")
    assert main(["config", "import", "f.yaml", "--output", "ours.yaml"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "ours.yaml\n"
    assert printed.err.splitlines() == [
        "read as: trainer.num_envs -> rollout.n_envs",
        "trainer.exp_name (from f.yaml line 1) is now a comment: the name of a run is that of its folder: set output",
    ]
    text = (tmp_path / "ours.yaml").read_text()
    assert text.splitlines() == [
        "# From f.yaml, by `sparring config import`. For `sparring train finetune`.",
        "rollout:",
        "  n_envs: 4  # was trainer.num_envs",
        "# Not converted (with the line in f.yaml, and the reason):",
        "#   trainer.exp_name: mine  (line 1: the name of a run is that of its folder: set output)",
    ]
    assert main(["config", "import", "f.yaml"]) == 0 and capsys.readouterr().out == text
    # existing files are not overwritten, including the imported one
    for there in ("f.yaml", "ours.yaml"):
        before = (tmp_path / there).read_text()
        assert main(["config", "import", "f.yaml", "--output", there]) == 2
        assert capsys.readouterr().err.endswith(f"--output {there} exists and is not overwritten; choose another\n")
        assert (tmp_path / there).read_text() == before
    assert main(["config", "import", "f.yaml", "wm"]) == 0
    assert "\nphase: teacher\n" in capsys.readouterr().out
    for words in (["import"], ["import", "f.yaml", "teacher", "x"], ["import", "f.yaml", "seed=1"], ["teacher", "x"]):
        assert main(["config", *words]) == 2 and "sparring config import FILE [PHASE]" in capsys.readouterr().err
    assert main(["config", "import", "f.yaml", "--output", "no/where.yaml"]) == 2
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err


def test_buffer_type_vla_of_the_documents_sets_async_mode(tmp_path, capsys):
    file = in_file(tmp_path, '{"trainer": {"buffer_type": "vla"}}', "f.json")
    assert main(["config", "finetune", "--config", str(file)]) == 0
    (message,) = capsys.readouterr().err.splitlines()
    assert message == "read as: trainer.buffer_type -> buffer.type, trainer.buffer_type=vla -> rollout.mode=async"
    # an explicit rollout.mode wins, in the file or later
    both = in_file(tmp_path, '{"rollout": {"mode": "sync"}, "trainer": {"buffer_type": "vla"}}', "both.json")
    assert load_config(both).rollout.mode == "sync"
    assert load_config(file, [Setting("rollout.mode", "sync", "command line")]).rollout.mode == "sync"
    # buffer.type itself does not change the mode
    for key in ("buffer.type", "buffer_type"):
        assert load_config({key: "vla"}).rollout.mode == "sync"


def test_renames_are_printed_once(tmp_path, capsys):
    file = in_file(tmp_path, "trainer: {num_envs: 4, use_wandb: false}\nstudent: {ppo: {gamma: 0.5}}\n", "f.yaml")
    assert main(["config", "finetune", "--config", str(file), "ppo.gamma=0.9", "--num_episodes", "5"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "read as: trainer.num_envs -> rollout.n_envs",
        "no effect, because this is the default or the only behaviour of Sparring: trainer.use_wandb=false",
        "for other phases, not used in this one: student.ppo.gamma",
    ]


def test_public_config_of_maniflow_is_imported(tmp_path):
    file = in_file(tmp_path, MANIFLOW_PUBLIC, "maniflow.yaml")
    written, notes = import_config(file, "imitate")
    found = flat(load_config(in_file(tmp_path, written, "ours.yaml"), [Setting("imitate.demos", "x", "here")]))
    expected = {
        "policy.name": "flow",
        "policy.horizon": 16,
        "policy.layers": 3,
        "policy.heads": 8,
        "policy.width": 256,
        "policy.sampling_steps": 10,
        "policy.point_channels": [64, 128, 256],
        "policy.point_features": 96,
        "rollout.action_steps": 8,
        "env.points": 64,
        "imitate.batch_size": 384,
        "imitate.learning_rate": 1e-4,
        "imitate.weight_decay": 1e-3,
        "imitate.lr_schedule": "cosine",
        "seed": 42,
        "device": "cuda:0",
        "logging.name": "42",
    }
    assert {key: found[key] for key in expected} == expected
    for reason in (
        "task_name (from maniflow.yaml line 4) is now a comment: refers to a value that is not in this file",
        "policy.consistency_batch_ratio (from maniflow.yaml line 18) is now a comment: the consistency term has",
        "policy.pointcloud_encoder_cfg.pointwise (from maniflow.yaml line 30) is now a comment: features of points",
        "ema.power (from maniflow.yaml line 31) is now a comment: averaged weights have a constant decay: set im",
        "n_obs_steps (from maniflow.yaml line 8) is now a comment: this is the default",
    ):
        assert any(note.startswith(reason) for note in notes), reason
    # every key is either converted, explained, or the same here
    same = {"policy.horizon", "logging.mode", "logging.name", "logging.project"}
    read_as = notes[0].removeprefix("read as: ")
    for setting in read_settings(file):
        explained = any(note.startswith(f"{setting.key} (from") for note in notes)
        # of two keys that are one key here, the later one is named
        assert (
            explained
            or f"{setting.key} -> " in read_as
            or setting.key
            in same
            | {
                "horizon",
                "n_action_steps",
                "policy.encoder_output_dim",
            }
        ), setting.key
    # a file with another history is refused with the reason
    other = in_file(tmp_path, MANIFLOW_PUBLIC.replace("n_obs_steps: 1", "n_obs_steps: 2"), "two.yaml")
    assert "policies read the current observation only" in import_config(other, "imitate")[0]
    with pytest.raises(UserError, match="n_obs_steps .* policies read the current observation only"):
        load_config(other, [Setting("imitate.demos", "x", "here")], "imitate")


def test_references_of_a_file_to_itself_are_followed(tmp_path):
    text = "seed: 3\nthreads: ${seed}\noutput: ${threads}\n"
    text += "logging: {name: '${logging.project}', project: '${logging.name}'}\n"
    # the text of a file that is not Hydra's is kept
    plain = {setting.key: setting.value for setting in read_settings(in_file(tmp_path, text, "plain.yaml"))}
    assert plain["threads"] == "${seed}"
    text += "policy: {_target_: a.Policy}\n"
    values = {setting.key: setting.value for setting in read_settings(in_file(tmp_path, text, "a.yaml"))}
    # a circle, and unknown keys, stay text
    assert (values["threads"], values["output"]) == (3, 3) and values["logging.name"].startswith("${")
    text = "output: ${HOME}/x-${seed}\npolicy._target_: a.Policy\n"
    assert read_settings(in_file(tmp_path, text, "b.yaml"))[0].value == "${HOME}/x-${seed}"


def test_a_long_chain_of_references_takes_a_short_time(tmp_path, monkeypatch):
    looked_up = []
    pattern = SimpleNamespace(fullmatch=lambda value: looked_up.append(value) or reference.fullmatch(value))
    reference = config_text._REFERENCE
    monkeypatch.setattr(config_text, "_REFERENCE", pattern)
    lines = "".join(f"a{n}: ${{a{n + 1}}}\n" for n in range(400))
    found = read_settings(in_file(tmp_path, f"{lines}a400: 3\npolicy._target_: a.Policy\n", "long.yaml"))
    assert [setting.value for setting in found[:401]] == [3] * 401
    assert len(looked_up) < 5 * 400


def test_chain_refuses_an_output_folder_of_a_phase(tmp_path):
    given = [Setting("teacher.output_dir", "outputs/mine", "f.yaml", 3)]
    with pytest.raises(UserError, match=r"^teacher.output_dir = outputs/mine \(from f.yaml line 3, for teacher\): "):
        train_all(given, tmp_path)


def test_tables_of_legacy_keys_are_disjoint():
    phase_keys = {key for table in PHASE_ALIASES.values() for key in table}
    assert not UNSUPPORTED.keys() & ({*ALIASES, *LISTED} | phase_keys)
    # every fixed value has a reason for refusing other values
    assert all(_why_unsupported(Setting(key, "?", "here")) for key in FIXED_VALUES)
    keys = SCHEMA.keys(SCHEMA.classes())
    assert not [key for key in (*UNSUPPORTED, *LISTED) if key in keys]
    assert all(key in keys for key, _ in LISTED.values())


# legacy keys whose values may be any number in (0, 1)
SHARES = [
    k for k, ours in ALIASES.items() if ours in ("ppo.clip_ratio", "ppo.gamma", "ppo.policy_lr", "ppo.entropy_coef")
]


@settings(max_examples=60, deadline=None)
@given(
    chosen=st.dictionaries(st.sampled_from(SHARES), st.floats(0.01, 0.99), min_size=1, max_size=3),
    phase=st.sampled_from(sorted(PHASES)),
)
def test_import_and_load_agree_on_any_file(tmp_path_factory, chosen, phase):
    folder = tmp_path_factory.mktemp("import")
    file = in_file(folder, to_yaml(chosen), "f.yaml")
    try:
        theirs = load_config(file, required(phase), phase)
    except ConfigError as error:
        with pytest.raises(ConfigError) as caught:
            import_config(file, phase)
        assert caught.value.problems == error.problems
        return
    ours = in_file(folder, import_config(file, phase)[0], "ours.yaml")
    assert load_config(ours, required(phase)) == theirs
