"""Files, overrides and sections: given values are set; all errors are reported together, one line each."""

import math
import os
import string
import tempfile
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import Field

from sparring.config import schema
from sparring.config.legacy import ALIASES
from sparring.config.schema import SCHEMA
from sparring.config.section import ConfigError, Schema, Section, accepted
from sparring.config.text import Setting, flatten, parse_overrides, read_settings, to_yaml
from sparring.envs import ENVS, SIMS
from sparring.envs.configs import GymConfig, TabletopConfig
from sparring.errors import UserError
from sparring.phases import CHAIN, PHASES
from sparring.runs.train_all import _settings_of as settings_of

# the runs and datasets that these configs name do not exist
load_config = partial(schema.load_config, inherit=False)
CONFIGS = Path(__file__).parents[2] / "configs"
GYM = {"env": {"name": "gym:CartPole-v1"}}
KNOWN_ENVS = f"{', '.join(ENVS)}, gym:ID, {', '.join(f'{prefix}:TASK' for prefix in SIMS)}, or your.module:Class"


def load(*words, file=None):
    return load_config(file, parse_overrides(list(words)))


def errors_of(*words, file=None):
    with pytest.raises(ConfigError) as caught:
        load(*words, file=file)
    assert str(caught.value) == "\n".join(caught.value.problems)
    assert caught.value.exit_code == 2
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def in_file(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def unreadable(path):
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    return str(caught.value).replace(str(path), "FILE")


# ---- overrides


@pytest.mark.parametrize("words", [["ppo.clip_ratio=0.1"], ["--ppo.clip_ratio", "0.1"], ["--ppo.clip_ratio=0.1"]])
def test_three_spellings_of_an_override_are_equivalent(words):
    assert parse_overrides(words) == [Setting("ppo.clip_ratio", 0.1, "command line")]
    assert load(*words).ppo.clip_ratio == 0.1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-1", -1),
        ("-1e-3", -0.001),
        ("1e-4", 1e-4),
        ("3E4", 3e4),
        (".5", 0.5),
        ("1.", 1.0),
        ("+2", 2),
        ("null", None),
        ("~", None),
        ("true", True),
        ("False", False),
        ("[64, 32]", [64, 32]),
        ("[]", []),
        ("{a: 1}", {"a": 1}),
        # YAML 1.1 would read these as a bool, a date, 90 minutes and an octal number
        ("yes", "yes"),
        ("2024-01-02", "2024-01-02"),
        ("1:30", "1:30"),
        ("010", "010"),
        ("'7'", "7"),
        ("a=b", "a=b"),
        ("gym:CartPole-v1", "gym:CartPole-v1"),
    ],
)
def test_values_of_overrides(text, value):
    expected = [Setting("x", value, "command line"), Setting("y", 1, "command line")]
    for words in ([f"x={text}", "y=1"], [f"--x={text}", "--y", "1"], ["--x", text, "y=1"]):
        if text == "a=b" and words[0] == "--x":
            continue  # `--x a=b` is a flag and another override
        got = parse_overrides(words)
        assert got == expected and type(got[0].value) is type(value)


def test_flag_without_a_value_is_true():
    assert [s.value for s in parse_overrides(["--a", "--b", "c=1", "--d"])] == [True, True, 1, True]
    assert load("--evaluation.baseline").evaluation.baseline is True


def test_missing_value_is_refused():
    assert errors_of("--ppo.ppo_epochs", "--ppo.critic_lr") == [
        "ppo.ppo_epochs = true (from command line): expected an integer > 0",
        "ppo.critic_lr = true (from command line): expected a number > 0 or null",
    ]


def test_all_invalid_overrides_are_reported():
    with pytest.raises(UserError) as caught:
        parse_overrides(["foo", "--3x", "1", "=2", "a=[1", "b=1"])
    assert str(caught.value).splitlines() == [
        "'foo' is not an override; write key=value or --key value",
        "'=2' is not an override; write key=value or --key value",
        "'--3x=1' is not an override; write key=value or --key value",
        "a = [1 (from command line): the value is not valid YAML (expected ',' or ']', but got '<stream end>')",
    ]


def test_later_override_wins_over_earlier_ones_and_files(tmp_path):
    file = in_file(tmp_path, "seed: 1\nppo: {gamma: 0.5, gae_lambda: 0.5}\n")
    config = load("seed=2", "seed=3", "ppo.gamma=0.9", file=file)
    assert (config.seed, config.ppo.gamma, config.ppo.gae_lambda) == (3, 0.9, 0.5)


def test_two_spellings_of_one_key_must_agree(tmp_path):
    assert errors_of("task_name=lift_d0", "env.task=stack_d0") == [
        "env.task = stack_d0 (from command line): task_name = lift_d0 is the same key and also given; keep one"
    ]
    assert load("task_name=lift_d0", "env.task=lift_d0").env.task == ("lift_d0",)
    # any spelling overrides a file
    file = in_file(tmp_path, "task_name: lift_d0")
    assert load("env.task=stack_d0", file=file).env.task == ("stack_d0",)


def test_unique_bare_name_is_accepted():
    config = load("--num_episodes", "500", "--clip_ratio", "0.3", "--hidden", "[8]")
    assert (config.training.num_episodes, config.ppo.clip_ratio, config.policy.hidden) == (500, 0.3, (8,))


def test_one_camera_needs_no_list():
    assert load("env.cameras=head").env.cameras == TabletopConfig(cameras="head").cameras == ("head",)
    assert errors_of("env.cameras=side")[0].startswith("env.cameras = side (from command line): expected a list, each")


def test_ambiguous_bare_name_is_refused():
    assert errors_of("name=x") == [
        "name (from command line): is ambiguous: env.name, policy.name, world_model.name, rewards.name, "
        "logging.name; write one of them",
    ]


def test_integral_numbers_with_exponents_are_integers():
    assert load("training.total_timesteps=1e6").training.total_timesteps == 1_000_000
    assert errors_of("training.total_timesteps=1.5") == [
        "training.total_timesteps = 1.5 (from command line): expected an integer > 0 or null"
    ]


def test_number_is_text_for_a_text_field():
    assert load("output=2024").output == "2024"
    assert load_config({"output": "2024"}).to_yaml().splitlines()[6].startswith("output: '2024'  #")


# ---- files


def test_yaml_and_json_with_comments_load_equally(tmp_path):
    as_yaml = in_file(tmp_path, "ppo:\n  gamma: 0.5\n  policy_lr: 3e-4\ntask_name: reach_d1\n")
    as_json = in_file(
        tmp_path,
        '{\n\t"ppo": {"gamma":0.5, // a comment with "quotes"\n\t\t"policy_lr": 3e-4},\n\t"task_name": "reach_d1"\n}',
        "run.json",
    )
    assert load_config(as_yaml) == load_config(as_json)
    assert load_config(as_yaml).env.task == ("reach_d1",)
    assert load_config(as_yaml).ppo.policy_lr == 3e-4
    # line numbers are kept although comments are removed
    assert [(s.key, s.line) for s in read_settings(as_json)] == [
        ("ppo.gamma", 2),
        ("ppo.policy_lr", 3),
        ("task_name", 4),
    ]


def test_json_strings_keep_their_slashes_and_tabs(tmp_path):
    file = in_file(tmp_path, '{"output": "http://a//b\\t\\"//c\\"\td"}', "run.json")
    assert load_config(file).output == 'http://a//b\t"//c"\td'


def test_dotted_keys_work_in_files_too(tmp_path):
    assert load_config(in_file(tmp_path, "ppo.gamma: 0.5\n")).ppo.gamma == 0.5


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "ppo:\n", "ppo: {}\nenv:\n"])
def test_empty_file_or_section_gives_defaults(tmp_path, text):
    assert load_config(in_file(tmp_path, text)) == load_config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n- 2\n", "config file 'FILE' line 1: expected keys with values at the top level, e.g. 'seed: 1'"),
        ("seven\n", "config file 'FILE' line 1: expected keys with values at the top level, e.g. 'seed: 1'"),
        ("seed: 1\nppo: [1,\n", "config file 'FILE' line 3: not valid YAML or JSON (expected the node content, but"),
        ("seed: 1\n\tx: 2\n", "config file 'FILE' line 2: not valid YAML or JSON (found character '\\t' that cannot"),
        ("a: 1\n---\nb: 2\n", "config file 'FILE' line 2: not valid YAML or JSON (but found another document)"),
        (
            "x: 1\nseed: !!int abc\n",
            "config file 'FILE' line 2: the tag !!int is not supported; write ",
        ),
        (
            "a: !!python/object:os.system x\n",
            "config file 'FILE' line 1: the tag !!python/object:os",
        ),
        (
            "a: &a {b: *a}\n",
            "config file 'FILE' line 1: the alias *a contains itself",
        ),
        (
            "base: &b\n  gamma: 0.9\nppo:\n  <<: *b\n",
            "config file 'FILE' line 4: merge keys (<<) are not supported; write",
        ),
        ("a: \x00\n", "config file 'FILE': not valid YAML or JSON (unacceptable character #x0000"),
    ],
)
def test_invalid_file_is_refused_with_its_line(tmp_path, text, message):
    assert unreadable(in_file(tmp_path, text)).startswith(message)


def test_file_of_overrides_is_refused(tmp_path):
    message = unreadable(in_file(tmp_path, "seed=1\nthreads=2\n"))
    assert message.endswith("e.g. 'seed: 1'; overrides like seed=1 belong on the command line")


def test_unreadable_file_is_refused(tmp_path):
    missing = "config file 'FILE' cannot be read (No such file or directory)"
    assert unreadable(tmp_path / "missing.yaml") == missing
    assert unreadable(tmp_path) == "config file 'FILE' cannot be read (Is a directory)"
    (tmp_path / "image.yaml").write_bytes(b"\x89PNG\xff\xfe")
    assert unreadable(tmp_path / "image.yaml") == "config file 'FILE' is not text; give a YAML or JSON file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission_is_refused(tmp_path):
    file = in_file(tmp_path, "seed: 1\n")
    file.chmod(0)
    assert unreadable(file) == "config file 'FILE' cannot be read (Permission denied)"


# ---- errors


def test_all_errors_are_reported_with_key_origin_and_expectation(tmp_path):
    file = in_file(
        tmp_path,
        "seed: -1\nppo:\n  clip_ration: 0.1\n  gamma: fast\n  lr_schedule: square\nrolout:\n  n_envs: 2\n"
        "policy:\n  hidden: [64, 0]\nbuffer: 3\nenv:\n  image_size:\n    width: 2\n",
    )
    assert errors_of("evaluation.baseline=maybe", "--batch_size", "0", file=file) == [
        "ppo.clip_ration (from run.yaml line 3): unknown key; nearest: ppo.clip_ratio (a number > 0 and < 1)",
        "rolout.n_envs (from run.yaml line 7): unknown key; nearest: rollout.n_envs (an integer > 0)",
        "buffer (from run.yaml line 10): is a section, not a value; its keys are buffer.type, buffer.size, "
        "buffer.memory_limit_gb, buffer.folder",
        "env.image_size.width (from run.yaml line 13): env.image_size has no subkeys; "
        "expected an integer >= 16 and <= 512",
        "policy.hidden = [64, 0] (from run.yaml line 9): expected a list, each an integer > 0",
        "ppo.mini_batch_size = 0 (from command line, given as batch_size): expected an integer > 0",
        "ppo.lr_schedule = square (from run.yaml line 5): expected one of: constant, linear, cosine",
        "ppo.gamma = fast (from run.yaml line 4): expected a number >= 0 and <= 1",
        "evaluation.baseline = maybe (from command line): expected true or false",
        "seed = -1 (from run.yaml line 1): expected an integer >= 0 and < 2147483648",
    ]


def test_key_given_twice_in_a_file_is_refused(tmp_path):
    file = in_file(tmp_path, "seed: 1\nppo:\n  gamma: 0.9\n  gamma: 0.8\nrollout: {n_envs: 2}\nnum_envs: 3\n")
    assert errors_of(file=file) == [
        "ppo.gamma = 0.8 (from run.yaml line 4): is also given in line 3; keep one",
        "rollout.n_envs = 3 (from run.yaml line 6, given as num_envs): is also given in line 5; keep one",
    ]


# overrides -> the beginning of the one-line error; (..) is the origin
ERRORS = {
    "zzz=1": "zzz (..): unknown key; valid here: phase, algorithm, seed, ",
    "ppo.zzz=1": "ppo.zzz (..): unknown key; valid here: ppo.mini_batch_size, ppo.micro_batch_size, ",
    "ppo.lr=3": "ppo.lr (..): unknown key; nearest: ppo.policy_lr (a number > 0)",
    "grpo.lr=3": "grpo.lr (..): unknown key; nearest: grpo.policy_lr (a number > 0)",
    "teacher.lr=3": "teacher.lr (..): unknown key; nearest: teacher.learning_rate (a number > 0)",
    "imitate.lr=3": "imitate.lr (..): unknown key; nearest: imitate.learning_rate (a number > 0)",
    "lr=3": "lr (..): unknown key; nearest: ppo.policy_lr (a number > 0)",
    "phase=imitate lr=3": "lr (..): unknown key; nearest: imitate.learning_rate (a number > 0)",
    "algorithm=grpo lr=3": "lr (..): unknown key; nearest: grpo.policy_lr (a number > 0)",
    "qqq.gama=1": "qqq.gama (..): unknown key; nearest: ppo.gamma (a number >= 0 and <= 1)",
    "task_nam=x": "task_nam (..): unknown key; nearest: env.task (a list, each text)",
    "ppo=0": "ppo (..): is a section, not a value; its keys are ppo.mini_batch_size, ",
    "ppo.gamma=null": "ppo.gamma = null (..): expected a number >= 0 and <= 1",
    "ppo.gamma=.nan": "ppo.gamma = .nan (..): expected a number >= 0 and <= 1",
    "ppo.adam_eps=1e999": "ppo.adam_eps = .inf (..): expected a number > 0",
    "ppo.gamma={}": "ppo.gamma = {} (..): expected a number >= 0 and <= 1",
    "rollout.n_envs=two": "rollout.n_envs = two (..): expected an integer > 0",
    "env.cameras=[side]": "env.cameras = [side] (..): expected a list, each one of: head, wrist",
    "env.name=tabletap": (f"env.name = tabletap (..): unknown env 'tabletap'; nearest: tabletop; known: {KNOWN_ENVS}"),
    "env.name=CartPole-v1": (
        f"env.name = CartPole-v1 (..): unknown env 'CartPole-v1'; did you mean gym:CartPole-v1? known: {KNOWN_ENVS}"
    ),
    "env.name=[1]": f"env.name = [1] (..): expected one of: {KNOWN_ENVS}",
    "policy.name=mlp": (
        "policy.name = mlp (..): unknown policy 'mlp'; known: actor_critic, flow, vla, native_vla, pi0, or "
        "your.module:Class"
    ),
    "algorithm=ppu": (
        "algorithm = ppu (..): unknown algorithm 'ppu'; nearest: ppo; known: ppo, grpo, or your.module:Class"
    ),
    "env.name=gym:Pendulm-v1": (
        "env.name = 'gym:Pendulm-v1' (..): not registered in gymnasium (Environment `Pendulm` "
        "doesn't exist. Did you mean: `Pendulum`?); if a package registers it, write gym:<package>:Pendulm-v1, "
        "as in gym:gymnasium_robotics:FetchReach-v4"
    ),
    "env.task=reach_d7": "env.task = reach_d7 (..): env.task='reach_d7' is not a tabletop task; did you mean 'reach_",
    "env.task=[]": "env.task = [] (..): expected at least one of: reach_d0, ",
    "phase=phase9": "phase = phase9 (..): unknown phase; expected one of: finetune",
    "phase=wmm": "phase = wmm (..): unknown phase; expected one of: finetune",
    "device=gpu": "device = gpu (..): expected auto, cpu, cuda or cuda:<index>",
    "env.name=no.such:Env": (
        "env.name = 'no.such:Env' (..): env 'no.such:Env': no module 'no'; is it in this folder or on PYTHONPATH?"
    ),
    "buffer.size=7 rollout.n_envs=8": (
        "buffer.size = 7 (..): is less than one decision for each of the 8 robots; expected >= "
        "8, or a smaller rollout.n_envs"
    ),
}


@pytest.mark.parametrize("words", ERRORS)
def test_each_kind_of_error(words):
    (line,) = errors_of(*words.split())
    assert line.startswith(ERRORS[words].replace("(..)", "(from command line)"))


def test_keys_of_a_section_of_unknown_class_are_not_checked():
    assert errors_of("env.name=tabletap", "env.kwargs.gravity=1", "ppo.gamma=2") == [
        f"env.name = tabletap (from command line): unknown env 'tabletap'; nearest: tabletop; known: {KNOWN_ENVS}",
        "ppo.gamma = 2 (from command line): expected a number >= 0 and <= 1",
    ]


def test_without_gymnasium_no_id_is_suggested(monkeypatch):
    monkeypatch.setattr("sparring.config.schema.find_spec", lambda name: None)
    (line,) = errors_of("env.name=CartPole-v1")
    assert f"unknown env 'CartPole-v1'; known: {KNOWN_ENVS}" in line


@pytest.mark.parametrize("phase", ["finetune", "imitate"])
def test_phase_without_teacher_refuses_the_key(phase):
    with pytest.raises(ConfigError, match=f"^{phase}.teacher .*: unknown key; "):
        schema.load_config(None, parse_overrides([f"{phase}.teacher=outputs/teacher_rl"]), phase)


def test_name_of_a_section_selects_its_keys():
    assert load("env.name=gym:CartPole-v1", "env.vectorize=process").env.vectorize == "process"
    assert errors_of("env.vectorize=process")[0].startswith("env.vectorize (from command line): unknown key; ")
    assert errors_of("env.name=gym:CartPole-v1", "task_name=reach_d0") == [
        "task_name (from command line): unknown key; as env.task it is a key of env.name=tabletop"
    ]


def test_error_of_a_key_names_the_classes_that_have_it():
    (line,) = errors_of("policy.consistency=1")
    assert line == "policy.consistency (from command line): unknown key; it is a key of policy.name=flow"
    (line,) = errors_of("policy.name=flow", "policy.init_std=0.1")
    assert line == "policy.init_std (from command line): unknown key; it is a key of policy.name=actor_critic"
    (line,) = errors_of("env.kwargs.gravity=1")
    assert line == "env.kwargs.gravity (from command line): unknown key; it is a key of env.name=gym:<id>"
    (line,) = errors_of("policy.method=fpo")
    kinds = [f"policy.name={name}" for name in ("flow", "vla", "native_vla", "pi0")]
    many = f"unknown key; it is a key of {' and '.join(kinds)}; add one of them, e.g. policy.name=flow"
    assert line == f"policy.method (from command line): {many}"
    # a key of no policy is a typing error
    assert errors_of("policy.metod=flow_sde")[0].startswith("policy.metod (from command line): unknown key; nearest: ")


def test_keys_below_a_dict_are_merged():
    def kwargs(*words):
        return load("env.name=gym:CartPole-v1", *words).env.kwargs

    assert kwargs("env.kwargs.a=1", "env.kwargs.b.c=2") == {"a": 1, "b": {"c": 2}}
    assert kwargs("env.kwargs={a: 1}", "env.kwargs.b=2") == {"a": 1, "b": 2}
    assert kwargs("env.kwargs.a=1", "env.kwargs={b: 2}") == {"b": 2}
    assert kwargs("env.kwargs.a=1", "env.kwargs.a.b=2") == {"a": {"b": 2}}
    assert kwargs("env.kwargs=5", "env.kwargs.a=1") == {"a": 1}


def test_loading_does_not_change_python_values():
    source = {"env": {"name": "gym:CartPole-v1", "kwargs": {}}}
    load_config(source, parse_overrides(["env.kwargs.a=1"]))
    assert source == {"env": {"name": "gym:CartPole-v1", "kwargs": {}}}
    assert load_config({"ppo.gamma": 0.5}).ppo.gamma == 0.5
    with pytest.raises(ConfigError, match=r"^ppo.gamma = 7 \(from Python\): expected a number >= 0 and <= 1$"):
        load_config({"ppo": {"gamma": 7}})


# ---- the formats of earlier documents

DOCUMENTED = {
    "task_name=reach_d1": ("env.task", ["reach_d1"]),
    "rl_training.num_epochs=50": ("training.iterations", 50),
    "rl_training.rollout_collector.n_envs=32": ("rollout.n_envs", 32),
    "rl_training.ppo_trainer.clip_ratio=0.1": ("ppo.clip_ratio", 0.1),
    "rl_training.ppo_trainer.entropy_coef=0.001": ("ppo.entropy_coef", 0.001),
    "rl_training.ppo_trainer.policy_lr=5e-6": ("ppo.policy_lr", 5e-6),
    "rl_training.ppo_trainer.mini_batch_size=32": ("ppo.mini_batch_size", 32),
    "rl_training.ppo_trainer.gae_lambda=0.9": ("ppo.gae_lambda", 0.9),
    "pretrained_policy_path=/path/to/checkpoint.ckpt": ("pretrained", "/path/to/checkpoint.ckpt"),
    "training.device=cuda:1": ("device", "cuda:1"),
    "environment.control_mode=delta_qpos": ("env.control_mode", "delta_qpos"),
    "--num_episodes=500": ("training.num_episodes", 500),
    "logging.console_level=WARNING": ("logging.console_level", "WARNING"),
}


@pytest.mark.parametrize("word", DOCUMENTED)
def test_documented_spellings_are_accepted(word):
    key, value = DOCUMENTED[word]
    assert flatten(load(word).dump())[key] == value


def test_documented_json_is_accepted(tmp_path):
    text = """{
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
    config = load_config(in_file(tmp_path, text, "my_config.json"))
    assert (config.buffer.size, config.training.iterations, config.rollout_steps) == (2048, 500, 128)
    ppo = config.ppo
    assert (ppo.policy_lr, ppo.gamma, ppo.ppo_epochs, ppo.mini_batch_size) == (3e-4, 0.99, 10, 64)


def test_every_alias_names_a_key():
    keys = SCHEMA.keys(SCHEMA.classes())
    for name in ("vla", "flow"):
        keys |= SCHEMA.keys(SCHEMA.classes([Setting("policy.name", name, "test")]))
    # an alias that ends with a dot is a prefix of keys
    beginnings = {f"{key}." for key in (*keys, *SCHEMA.classes())}
    # an alias that begins with a phase is for that phase only
    phase_keys = {f"{phase}.{key}" for phase in CHAIN for key in keys}
    assert {alias: key for alias, key in ALIASES.items() if key not in {*keys, *beginnings, *phase_keys}} == {}
    assert all(alias.endswith(".") == key.endswith(".") for alias, key in ALIASES.items())
    assert [alias for alias in ALIASES if alias in keys] == []


# ---- the algorithm that is not in use

GRPO = ["algorithm=grpo", "rollout.n_episodes_per_batch=16", "rollout.group_size=2"]
UNREAD = {
    "ppo.policy_lr=1e-5": "ppo.policy_lr = 1.0e-05 (..): is not used by algorithm=grpo; set grpo.policy_lr",
    "ppo.ppo_epochs=2": "ppo.ppo_epochs = 2 (..): is not used by algorithm=grpo; set grpo.epochs",
    "--clip_ratio=0.1": "ppo.clip_ratio = 0.1 (.., given as clip_ratio): is not used by algorithm=grpo; remove it, "
    "or set algorithm=ppo",
    "algorithm.cfg.gamma=0.9": "ppo.gamma = 0.9 (.., given as algorithm.cfg.gamma): is not used by algorithm=grpo; ",
    "rl_training.ppo_trainer.gamma=0.9": "ppo.gamma = 0.9 (.., given as rl_training.ppo_trainer.gamma): is not used",
}


@pytest.mark.parametrize("word", UNREAD)
def test_settings_of_an_unused_algorithm_are_refused(word):
    (line,) = errors_of(*GRPO, word)
    assert line.startswith(UNREAD[word].replace("..", "from command line"))


def test_settings_of_grpo_with_ppo_and_of_both_with_user_algorithms_are_refused():
    assert errors_of("grpo.clip_high=0.3", "grpo.epochs=2", "grpo.target_kl=0.1") == [
        "grpo.target_kl = 0.1 (from command line): is not used by algorithm=ppo; set ppo.target_kl",
        "grpo.clip_high = 0.3 (from command line): is not used by algorithm=ppo; remove it, or set algorithm=grpo",
        "grpo.epochs = 2 (from command line): is not used by algorithm=ppo; set ppo.ppo_epochs",
    ]
    own = "algorithm=sparring.algorithms.grpo:GRPO"
    assert errors_of(own, "ppo.gamma=0.5", "grpo.policy_lr=0.5") == [
        f"ppo.gamma = 0.5 (from command line): is not used by {own}; remove it, or set algorithm=ppo",
        f"grpo.policy_lr = 0.5 (from command line): is not used by {own}; set algorithm_config.policy_lr",
    ]


def test_short_keys_belong_to_the_algorithm_in_use():
    words = ["learning_rate=1e-5", "batch_size=7", "n_epochs=3", "algorithm.cfg.target_kl=0.2"]
    grpo = load(*GRPO, *words).grpo
    assert (grpo.policy_lr, grpo.mini_batch_size, grpo.epochs, grpo.target_kl) == (1e-5, 7, 3, 0.2)
    ppo = load(*words).ppo
    assert (ppo.policy_lr, ppo.mini_batch_size, ppo.ppo_epochs, ppo.target_kl) == (1e-5, 7, 3, 0.2)
    # in a phase without RL, for any algorithm
    given = parse_overrides(["algorithm=grpo", "batch_size=7", "imitate.demos=x"])
    assert load_config(None, given, "imitate").imitate.batch_size == 7


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("words", [[], GRPO, ["algorithm=sparring.algorithms.ppo:PPO"]], ids=["ppo", "grpo", "own"])
def test_saved_config_with_all_algorithms_loads_back(tmp_path, phase, words):
    if (phase, words) == ("teacher", GRPO):
        words = words[:0]  # the teacher trains no policy
    starts = ["imitate.demos=x", "student.teacher=x", "adversarial.teacher=x"]
    config = load_config(None, parse_overrides([*words, *starts]), phase)
    assert load_config(in_file(tmp_path, config.to_yaml())) == config


# ---- printing


@pytest.mark.parametrize("source", [None, GYM], ids=["tabletop", "gym"])
def test_every_key_is_printed_with_its_description_and_loads_back(tmp_path, source):
    config = load_config(source)
    text = config.to_yaml()
    for key, info in SCHEMA.keys({name: type(value) for name, value in config if isinstance(value, Section)}).items():
        assert info.description and "\n" not in info.description, f"{key} has no one-line description"
        lines = [line.strip() for line in text.splitlines() if line.endswith(f"  # {info.description}")]
        # sections may share fields, but no two fields share a description
        assert {line.partition(":")[0] for line in lines} == {key.rpartition(".")[2]}
    assert load_config(in_file(tmp_path, text)) == config
    # other YAML readers read the same keys
    assert flatten(yaml.safe_load(text)).keys() == flatten(config.dump()).keys()


def test_all_files_in_configs_load():
    files = [path for path in CONFIGS.iterdir() if path.suffix in (".yaml", ".json")]
    assert {path.stem for path in files} >= {"cartpole", "pendulum"}
    for file in files:
        settings = read_settings(file)
        phase = {setting.key: setting.value for setting in settings}.get("phase")
        # without a phase the file may be for the chain, with settings of single phases
        for each in [phase] if phase else CHAIN if file.stem == "quickstart" else [None]:
            load_config(None, settings_of(each, settings, Path("out")) if each in CHAIN else settings, each)


def _numbers():
    """(key, strategy of its values) of every numeric field."""
    for source in (None, GYM):
        config = load_config(source)
        classes = {name: type(value) for name, value in config if isinstance(value, Section)}
        for key, info in SCHEMA.keys(classes).items():
            kind = "integer" if "an integer" in accepted(info) else "number" if "a number" in accepted(info) else None
            if kind and "a list" not in accepted(info):
                yield source, key, _within(kind, info.metadata)


def _within(kind, metadata):
    bound = {name: getattr(m, name) for m in metadata for name in ("gt", "ge", "lt", "le") if hasattr(m, name)}
    low, high = bound.get("gt", bound.get("ge")), bound.get("lt", bound.get("le"))
    if kind == "integer":
        least = None if low is None else math.floor(low) + ("gt" in bound)
        most = 10**9 if high is None else math.ceil(high) - ("lt" in bound)
        return st.integers(least, most)
    return st.floats(
        low, high, exclude_min="gt" in bound, exclude_max="lt" in bound, allow_nan=False, allow_infinity=False
    )


NUMBERS = list(_numbers())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_numbers_within_bounds_survive_override_printing_and_loading(tmp_path_factory, data):
    source, key, values = data.draw(st.sampled_from(NUMBERS))
    value = data.draw(values)
    # settings that some keys require
    needs = {
        "buffer.size": ["rollout.n_envs=1"],
        "rollout.n_episodes_per_batch": ["rollout.n_envs=1"],
        "world_model.lora_r": ["world_model.trunk=x"],
        "rollout.staleness": ["rollout.mode=async"],
        "rollout.least_ess": ["rollout.mode=async"],
        "rollout.groups": [f"rollout.n_envs={value!r}"],
        "rollout.group_size": [f"rollout.n_envs={value!r}", f"rollout.n_episodes_per_batch={value!r}"],
        **{f"world_model.lora_{name}": ["world_model.trunk=vla"] for name in ("r", "alpha", "dropout")},
    }
    needed = GRPO if key.startswith("grpo.") else needs.get(key, [])
    config = load_config(source, parse_overrides([f"{key}={value!r}", *needed]))
    assert flatten(config.dump())[key] == value
    file = tmp_path_factory.mktemp("round") / "config.yaml"
    file.write_text(config.to_yaml())
    assert load_config(file) == config


def test_numeric_fields_were_found():
    keys = {key for _, key, _ in NUMBERS}
    assert {"seed", "ppo.clip_ratio", "ppo.critic_lr", "env.image_size", "env.workers"} <= keys


@settings(max_examples=200, deadline=None)
@example("two\nlines")
@example("\U0001f600")
@example("1e-5")
@example("null")
@example("a: b # c")
@given(st.text(max_size=20).filter(lambda text: text != "list"))  # the other key
def test_any_text_is_printed_on_one_line_and_loads_back(text):
    printed = to_yaml({"a": {text or "x": text, "list": [text, 1, None]}}, {"a": "meaning"})
    assert len(printed.splitlines()) == 3
    assert read(printed) == [
        Setting(f"a.{text or 'x'}", text, "config.yaml", 2),
        Setting("a.list", [text, 1, None], "config.yaml", 3),
    ]


def read(text):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(text)
        return read_settings(file)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=string.printable, max_size=60))
def test_reader_raises_user_errors_only(text):
    try:
        SCHEMA.build(read(text))
    except (ConfigError, UserError) as error:
        assert all(line.strip() for line in str(error).splitlines())


# ---- schemas without sparring's own sections


class Inner(Section):
    """An inner part."""

    size: int = Field(3, ge=1, description="how big")


class Undocumented(Section):
    size: float = Field(1.0)


class Root(Section):
    title: str = Field("x", description="what it is called")
    inner: Inner
    other: Undocumented


def test_saved_config_explains_each_section_and_key():
    lines = load_config().to_yaml().splitlines()
    assert "ppo:  # Clipped PPO." in lines and "  gamma: 0.97  # discount per env step" in lines


def test_schema_of_other_sections():
    own = Schema(Root)

    def build(*settings):
        return own.build(list(settings), lambda config: [("inner.size", "too big")] if config.inner.size > 5 else [])

    config = build(Setting("inner.size", 4, "here"))
    assert (config.title, config.inner.size, config.other.size) == ("x", 4, 1.0)
    with pytest.raises(ConfigError, match=r"^inner.size = 6 \(from there line 2\): too big$"):
        build(Setting("inner.size", 6, "there", 2))
    with pytest.raises(ConfigError, match="is ambiguous: inner.size, other.size"):
        build(Setting("size", 6, "there", 2))


def test_section_created_in_python_reports_all_errors():
    with pytest.raises(ConfigError) as caught:
        TabletopConfig(image_size=3, cameras=("side", "back"), action_scal=2)
    assert caught.value.problems == [
        "TabletopConfig: cameras=('side', 'back'): expected a list, each one of: head, wrist, left_wrist, right_wrist",
        "TabletopConfig: image_size=3: expected an integer >= 16 and <= 512",
        "TabletopConfig: action_scal=2 is an unknown key; nearest: action_scale",
    ]
    with pytest.raises(ConfigError, match="GymConfig: name: has no default and was not given; expected text"):
        GymConfig()


def test_sections_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load_config().ppo.gamma = 0.5


def test_memory_size_is_a_key_of_policies_with_a_memory():
    assert load_config({"policy": {"name": "native_vla", "memory_size": 3}}).policy.memory_size == 3
    (line,) = errors_of("policy.name=flow", "policy.memory_size=3")
    assert "policy.memory_size" in line and "unknown key; it is a key of policy.name=native_vla" in line


@pytest.mark.parametrize(
    "keys",
    [
        {"observation.b": "state", "z": "state", "observation.a": "state"},
        {"action.delta": "action", "action": "ignore"},
        {"action": "ignore", "action.delta": "action"},
    ],
)
def test_entries_of_a_dict_setting_keep_their_order(tmp_path, keys):
    config = load_config({"env": {"name": "gym:CartPole-v1", "roles": keys}, "imitate": {"keys": keys}})
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    again = load_config(tmp_path / "config.yaml")
    assert list(again.imitate.keys.items()) == list(again.env.roles.items()) == list(keys.items())
