"""Every setting is read by something: a key that changes nothing is a lie."""

import ast
from pathlib import Path

import pytest

from sparring.envs.configs import GymConfig
from sparring.lora_configs import LoraConfig
from sparring.policies.configs import FlowConfig
from sparring.policies.pi0_configs import PI0PolicyConfig
from sparring.tree import TREE, Config

SOURCE = Path(__file__).parents[1] / "src" / "sparring"
# the package in which `config.field` means a field of this section
PACKAGE = {
    "env": "envs",
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
    classes = [*TREE.classes().items(), ("env", GymConfig), ("policy", FlowConfig), ("policy", PI0PolicyConfig)]
    found = [(section, field) for section, cls in classes for field in cls.model_fields]
    top = [field for field in Config.model_fields if field not in TREE.classes()]
    return sorted({*found, *(("", field) for field in top)})


def reads() -> set[tuple[str, str, str]]:
    """(package, owner, attribute) of every `owner.attribute` in the source: `self.config.ppo.gamma` is ppo, gamma."""
    found = set()
    for file in SOURCE.rglob("*.py"):
        package = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add((package, _last_name(node.value), node.attr))
    return found


def _last_name(node: ast.AST) -> str:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.removeprefix("_")


READS = reads()


def is_read(section: str, field: str) -> bool:
    if section == "world_model" and field in LoraConfig.model_fields:
        # policies.lora reads them for whoever has them
        section = "policy"
    if not section:
        # the tree's own properties read them from self
        return any(attribute == field and owner == "config" for _, owner, attribute in READS) or (
            ("tree", "self", field) in READS
        )
    return any(
        attribute == field and (owner == section or (owner == "config" and package == PACKAGE.get(section)))
        for package, owner, attribute in READS
    )


@pytest.mark.parametrize(("section", "field"), fields(), ids=lambda part: part or "top")
def test_somebody_reads_it(section, field):
    assert is_read(section, field), (
        f"nothing reads {section}{'.' if section else ''}{field}; use it where it belongs or delete it"
    )


def test_a_dead_field_is_noticed():
    assert ("ppo", "clip_ratio") in fields() and ("env", "kwargs") in fields() and ("", "seed") in fields()
    assert ("policy", "denoising_discount") in fields()
    assert not is_read("ppo", "image_size")
    assert not is_read("rollout", "clip_ratio")
    assert not is_read("", "clip_ratio_of_nobody")
