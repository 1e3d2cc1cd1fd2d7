"""The source reads every setting: no key is without effect."""

import ast
from pathlib import Path

import pytest
import tiny_pi0
import torch
from parity_cases import METHODS
from vla_cases import CHUNK, LORA, RandomCameraEnv, flow, gaussian, native, pi0

from sparring.collect.collector import Collector
from sparring.config.inherit import LIMITS
from sparring.config.schema import SCHEMA, Config
from sparring.data.buffer import RolloutBuffer
from sparring.envs.configs import GymConfig
from sparring.envs.env import Env
from sparring.policies.configs import FlowConfig, LoraConfig, PI0PolicyConfig
from sparring.policies.policy import make_policy
from sparring.rewards import TERMS
from sparring.world_models.token_model import PRESETS

SOURCE = Path(__file__).parents[2] / "src" / "sparring"
# the package in which `config.field` means a field of this section
PACKAGE = {
    "env": "envs",
    "buffer": "data",
    "policy": "policies",
    "world_model": "world_models",
    "ppo": "algorithms",
    "grpo": "algorithms",
    "imitate": "phases",
    "teacher": "phases",
    "adversarial": "phases",
    "rewards": "rewards",
    "logging": "record",
}


def fields() -> list[tuple[str, str]]:
    """(section or '' for the top level, field)."""
    classes = [*SCHEMA.classes().items(), ("env", GymConfig), ("policy", FlowConfig), ("policy", PI0PolicyConfig)]
    found = [(section, field) for section, cls in classes for field in cls.model_fields]
    top = [field for field in Config.model_fields if field not in SCHEMA.classes()]
    return sorted({*found, *(("", field) for field in top)})


def reads() -> set[tuple[str, str, str]]:
    """(package, owner, attribute) of every `owner.attribute` in the source: `self.config.ppo.gamma` is ppo, gamma."""
    found = set()
    for file in SOURCE.rglob("*.py"):
        package = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = _last_name(node.value)
                # properties of a section read fields from self
                is_config = owner == "self" and file.stem in ("configs", "config", "schema")
                found.add((package, "config" if is_config else owner, node.attr))
    return found


def _last_name(node: ast.AST) -> str:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.removeprefix("_")


READS = reads()
# read by name in loops over reward terms, sizes and limits
READ_IN_A_LOOP = {*(("rewards", term) for term in TERMS), *(("world_model", size) for size in PRESETS["small"])}
READ_IN_A_LOOP |= {tuple(key.split(".")) for key in LIMITS}


def is_read(section: str, field: str) -> bool:
    if section == "world_model" and field in LoraConfig.model_fields:
        # policies.lora reads them for policies and world models
        section = "policy"
    if section == "world_model" and field == "name":
        # config.resolve.build reads it
        return ("config", "section", "name") in READS
    if (section, field) in READ_IN_A_LOOP:
        return True
    if not section:
        return any(attribute == field and owner == "config" for _, owner, attribute in READS)
    return any(
        attribute == field and (owner == section or (owner == "config" and package == PACKAGE.get(section)))
        for package, owner, attribute in READS
    )


@pytest.mark.parametrize(("section", "field"), fields(), ids=lambda part: part or "top")
def test_setting_is_read(section, field):
    assert is_read(section, field), (
        f"nothing reads {section}{'.' if section else ''}{field}; use it where it belongs or delete it"
    )


def test_unread_field_is_found():
    assert ("ppo", "clip_ratio") in fields() and ("env", "kwargs") in fields() and ("", "seed") in fields()
    assert ("policy", "denoising_discount") in fields()
    assert not is_read("ppo", "image_size")
    assert not is_read("rollout", "clip_ratio")
    assert not is_read("", "clip_ratio_of_nobody")


# ---- pretrained policies: three kinds share names of settings, so reads are recorded while each is used

PRETRAINED = {"vla": (gaussian, flow), "pi0": (pi0,), "native_vla": (native,)}
# some settings are read only with certain values of others
USES = [METHODS["flow_sde"], METHODS["mdp_sde"], METHODS["flow_noise"], LORA]


def recording(config, read: set[str]):
    """A copy of the config that adds the name of each setting that is read to `read`."""

    class Watched(type(config)):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    return Watched.model_construct(**dict(config))


def use(config) -> None:
    """Create the policy, act, score and compute the imitation loss."""
    torch.manual_seed(0)
    env, buffer = Env(RandomCameraEnv(2)), RolloutBuffer(2)
    policy = make_policy(config, env.spec, CHUNK).eval()
    Collector(env, policy, seed=0, chunk=CHUNK).collect(buffer)
    rows = buffer.get()
    policy.evaluate(rows)
    rows["action"] = rows["action"][:, :1].repeat(1, policy.horizon, 1)
    rows["valid"] = torch.ones(len(rows), policy.horizon, dtype=torch.bool)
    policy.train().imitation_loss(rows, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", PRETRAINED)
def test_pretrained_policy_reads_each_of_its_settings(name, tmp_path):
    checkpoint, read = tiny_pi0.write(tmp_path), set()
    for make in PRETRAINED[name]:
        for settings in USES:
            # a model without a flow head refuses the settings of one
            if make is not gaussian or settings is LORA:
                config = make(checkpoint, **settings)
                use(recording(config, read))
    assert config.name == name
    dead = [field for field in type(config).model_fields if field not in read]
    assert not dead, f"nothing reads policy.{', policy.'.join(dead)} of {name}; use it where it belongs or delete it"


def test_unread_setting_of_a_pretrained_policy_is_found(tmp_path):
    read = set()
    use(recording(native(tmp_path), read))
    assert {"vision_width", "text_tokens", "lora_r"} <= read
    # lora_dropout is read with LoRA only, attention by another kind
    assert "lora_dropout" not in read and "attention" not in read
