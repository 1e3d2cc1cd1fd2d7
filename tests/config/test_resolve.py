"""Resolving names of classes, or one-line errors; user classes in a config."""

import sys

import pytest
from pydantic import Field

from sparring.config.resolve import config_class, resolve
from sparring.config.schema import load_config
from sparring.config.section import Section
from sparring.config.text import parse_overrides
from sparring.errors import UserError, describe_error

ANNOTATE = "its first parameter must be annotated with its config class, e.g. def __init__(self, config: MyConfig, ...)"
KNOWN = {"square": "math:sqrt", "log": "math:log"}


class GripConfig(Section):
    """A user's gripper."""

    force: float = Field(2.0, gt=0, description="in newton")


class Grip:
    def __init__(self, config: GripConfig, spec, chunk: int): ...


class NamedConfig(Section):
    name: str = "me"


class Named:
    def __init__(self, config: NamedConfig): ...


class Unannotated:
    def __init__(self, config, spec): ...


class NoParameters:
    pass


class PlainDict:
    def __init__(self, config: dict): ...


class Unresolvable:
    def __init__(self, config: "Nowhere"): ...  # noqa: F821


def sentence(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module with the given text and makes it importable; returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(text, name="their_module"):
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_short_names_and_import_paths():
    import math

    assert resolve("square", KNOWN, "thing") is math.sqrt
    assert resolve("math:log", KNOWN, "thing") is math.log
    # an import path is not looked up among the known names
    assert sentence(resolve, "no.such:Thing", KNOWN, "thing").startswith("thing 'no.such:Thing': no module 'no'")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such:X", "thing 'no_such:X': no module 'no_such'; is it in this folder or on PYTHONPATH?"),
        ("math.deeper:X", "thing 'math.deeper:X': no module 'math.deeper'; is it in this folder or on PYTHONPATH?"),
        ("math:sqrd", "thing 'math:sqrd': module 'math' has no 'sqrd'; nearest: sqrt"),
        ("math:qqqqqq", "thing 'math:qqqqqq': module 'math' has no 'qqqqqq'"),
        (":X", "thing ':X' is not an import path; expected your.module:Class"),
        ("math:", "thing 'math:' is not an import path; expected your.module:Class"),
        (".x:Y", "thing '.x:Y' is not an import path; expected your.module:Class"),
        ("a b:Y", "thing 'a b:Y' is not an import path; expected your.module:Class"),
    ],
)
def test_bad_import_path_is_refused(path, message):
    assert sentence(resolve, path, {}, "thing") == message


def test_unknown_name_is_refused():
    message = "unknown thing 'sqare'; nearest: square; known: square, log, or your.module:Class"
    assert sentence(resolve, "sqare", KNOWN, "thing") == message
    assert sentence(resolve, "zzz", KNOWN, "thing") == ("unknown thing 'zzz'; known: square, log, or your.module:Class")


def test_module_with_a_missing_dependency_is_refused(module):
    name = module("import not_installed_at_all\n")
    assert sentence(resolve, f"{name}:X", {}, "env") == (
        "env 'their_module:X': no module 'not_installed_at_all'; "
        "'their_module' itself needs 'not_installed_at_all', which is not installed"
    )


def test_module_that_fails_on_import_is_refused(module, tmp_path):
    name = module("x = 1\ny = x / 0\n")
    assert sentence(resolve, f"{name}:X", {}, "env") == (
        "env 'their_module:X': importing 'their_module' failed: ZeroDivisionError: division by zero "
        f"({tmp_path / 'their_module.py'} line 2)"
    )
    name = module("def broken(:\n", "their_other_module")
    message = sentence(resolve, f"{name}:X", {}, "env")
    assert message.startswith("env 'their_other_module:X': importing 'their_other_module' failed: SyntaxError: invalid")


def test_describe_error_gives_one_line():
    try:
        raise KeyError("two\nlines")
    except KeyError as error:
        described = describe_error(error)
    assert described.startswith("KeyError: 'two\\nlines' (") and described.partition(" line ")[2].endswith(")")


def test_config_class_is_the_first_annotation():
    assert config_class(Grip, "policy") is GripConfig


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Unannotated, ANNOTATE),
        (NoParameters, ANNOTATE),
        (
            Unresolvable,
            "an annotation of __init__ cannot be resolved (name 'Nowhere' is not defined); import it at run time",
        ),
    ],
)
def test_class_without_a_config_is_refused(cls, message):
    assert sentence(config_class, cls, "policy") == f"policy 'test_resolve:{cls.__name__}': {message}"
    # as an error of a config
    words = parse_overrides([f"policy.name=test_resolve:{cls.__name__}"])
    assert f"policy.name = 'test_resolve:{cls.__name__}' (from command line): policy" in sentence(
        load_config, None, words
    )


def test_config_that_is_no_section_is_refused():
    words = parse_overrides(["policy.name=test_resolve:PlainDict"])
    assert sentence(load_config, None, words) == (
        "policy.name = 'test_resolve:PlainDict' (from command line): policy 'test_resolve:PlainDict': "
        "its config <class 'dict'> must be a sparring.config.Section, e.g. class MyConfig(Section)"
    )


def test_function_is_refused_as_policy():
    assert sentence(config_class, print, "policy") == (
        "policy <built-in function print> is not a class; expected your.module:Class"
    )


def test_user_class_adds_its_keys_and_a_name():
    words = ["policy.name=test_resolve:Grip", "policy.force=3"]
    config = load_config(None, parse_overrides(words))
    assert isinstance(config.policy, GripConfig)
    assert (config.policy.name, config.policy.force) == ("test_resolve:Grip", 3.0)
    assert "  force: 3.0  # in newton" in config.to_yaml() and "policy:  # A user's gripper." in config.to_yaml()
    with pytest.raises(UserError, match="^policy.force = -1 .from command line.: expected a number > 0$"):
        load_config(None, parse_overrides(["policy.name=test_resolve:Grip", "policy.force=-1"]))


def test_config_class_with_a_name_is_used_unchanged():
    config = load_config({"policy": {"name": "test_resolve:Named"}})
    assert type(config.policy) is NamedConfig and config.policy.name == "test_resolve:Named"
    # a class without docstring has no comment
    assert "\npolicy:\n" in config.to_yaml()


def test_user_algorithm_has_its_section():
    words = parse_overrides(["algorithm=test_resolve:Grip", "algorithm_config.force=4"])
    config = load_config(None, words)
    assert config.algorithm_section.force == 4.0
    assert load_config().algorithm_section is not None
    assert load_config().algorithm_section == load_config().ppo


def make_cartpole():
    import gymnasium

    return gymnasium.make("CartPole-v1")


def test_user_gymnasium_envs_by_class_function_or_id(module):
    from sparring.envs.configs import GymConfig

    name = module(
        "import gymnasium\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Mine(CartPoleEnv): pass\ngymnasium.register('Mine-v0', Mine)\n"
    )
    for env in (f"{name}:Mine", "test_resolve:make_cartpole", f"gym:{name}:Mine-v0", "gym:CartPole"):
        assert type(load_config({"env": {"name": env}}).env) is GymConfig, env
    message = sentence(load_config, {"env": {"name": "gym:no_such_module:Mine-v0"}})
    assert message == (
        "env.name = 'gym:no_such_module:Mine-v0' (from Python): env 'gym:no_such_module:Mine-v0': "
        "no module 'no_such_module'; is it in this folder or on PYTHONPATH? Otherwise: pip install no-such-module"
    )
