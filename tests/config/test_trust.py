"""Code named by somebody else's run, checkpoint or dataset is not imported without --trust; one's own is."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from small_runs import SMALL, seal

from sparring import envs
from sparring.api import load_policy, load_world_model
from sparring.cli.main import main
from sparring.config.inherit import inherited_settings
from sparring.config.resolve import resolve
from sparring.config.schema import load_config
from sparring.config.text import Setting, parse_overrides
from sparring.config.trust import SIMULATORS, TrustError, _names_code, refuse_code, trusted_settings, trusting
from sparring.errors import UserError
from sparring.processes import manifest
from sparring.report.run_folder import RunFolder
from sparring.runs.checkpoint import checkpoints
from sparring.runs.run import Run

# dotted key -> value; {m} is a module that creates the file {mark} when it is imported
CODE = {
    "env": {"env.name": "{m}:Thing"},
    "env in a package": {"env.name": "{m}.inner:Thing"},
    "env with settings": {"env.name": "{m}:Thing", "env.kwargs": {"a": 1}},
    "gymnasium id": {"env.name": "gym:{m}:Thing-v0"},
    "gymnasium id that is none": {"env.name": "gym:{m}:2 D"},
    "policy": {"policy": {"name": "{m}:Thing"}},
    "world model": {"world_model": {"name": "{m}:Thing"}},
    "algorithm": {"algorithm": "{m}:Thing"},
}
# names that eval does not import, or that a second check refuses
OWN_FUNCTION = {"env.name": "sparring.processes.files:write_whole", "env.kwargs": {"path": "{mark}", "text": "x"}}
REFUSED = {
    "a function of ours": OWN_FUNCTION,
    "gymnasium id by our own package": {"env.name": "gym:sparring:{m}:Thing-v0"},
    "env as the originals call it": {"env": {}, "env_name": "{m}:Thing"},
    "os.system": {"env.name": "os:system", "env.kwargs": {"command": "touch {mark}"}},
    "posix.system": {"env.name": "posix:system", "env.kwargs": {"command": "touch {mark}"}},
    "exec": {"env.name": "builtins:exec", "env.kwargs": {"source": "open('{mark}', 'w')"}},
    "a builtin policy": {"policy": {"name": "os:system"}},
    "Popen as a policy": {"policy": {"name": "subprocess:Popen", "args": ["touch", "{mark}"]}},
    "Popen as an algorithm": {"algorithm": "subprocess:Popen", "algorithm_config": {"args": ["touch", "{mark}"]}},
    "Popen as a world model": {"world_model": {"name": "subprocess:Popen", "args": ["touch", "{mark}"]}},
    "VLA by its class": {"policy": {"name": "vla", "model_class": "{m}:Thing"}},
    "VLA by a dotted class": {"policy": {"name": "vla", "model_class": "{m}.Thing"}},
    "VLA by a bare key": {"policy": {"name": "vla"}, "model_class": "{m}.Thing"},
    "reward": {"rewards.{m}:term": 1.0},
    "reward among terms": {"rewards.terms": {"{m}:term": 1.0}},
    "reward in a package": {"rewards": {"{m}": {"inner:term": 1.0}}},
    "env that makes another": {"env.name": "gym:GymV26Environment-v0", "env.kwargs": {"env_id": "{m}:Thing-v0"}},
    "settings of an env, deep": {"env.kwargs": {"wrappers": [{"inner": [{"entry_point": "{m}:Thing"}]}]}},
    "settings of an env, a key": {"env.kwargs": {"wrappers": [{"{m}:Thing": {}}]}},
    "spaces around it": {"env.name": " {m}:Thing "},
    "lines around it": {"env.name": "\n{m}:Thing\n"},
    "a list": {"env.name": ["{m}:Thing"]},
    "the old gym": {"policy": {"name": "gym:make"}},
    "letters of others": {"env.name": "módulo:Thing"},
    "a letter that \\w is not": {"env.name": "℘:Thing"},
    "a letter within that \\w is not": {"policy": {"name": "l·l:Thing"}},
}
# functions that the config would call with its arguments
CALLED = {
    "subprocess.call": {"env.name": "subprocess:call", "env.kwargs": {"args": ["touch", "{mark}"]}},
    "runpy": {"env.name": "runpy:run_path", "env.kwargs": {"path_name": "{source}"}},
    "shutil": {"env.name": "shutil:copyfile", "env.kwargs": {"src": "{source}", "dst": "{mark}"}},
}


@pytest.fixture(scope="module")
def own_run(tmp_path_factory):
    """A short run; its settings name no code."""
    folder = tmp_path_factory.mktemp("own") / "run"
    run = Run(load_config(SMALL | {"env": {}, "output": str(folder)}), quiet=True)
    assert run.run()
    return folder


@pytest.fixture
def hostile(own_run, tmp_path, monkeypatch):
    """Writes a run as if downloaded, with the given settings; returns it and the file that its code would create."""
    name, mark = f"hostile_{abs(hash(str(tmp_path)))}", tmp_path / "mark"
    package = tmp_path / "elsewhere" / name
    package.mkdir(parents=True)
    source = package / "__init__.py"
    source.write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nclass Thing: pass\n")
    (package / "inner.py").write_text("class Thing: pass\n")
    monkeypatch.syspath_prepend(package.parent)

    def filled(value):
        if isinstance(value, str):
            return value.replace("{m}", name).replace("{mark}", str(mark)).replace("{source}", str(source))
        if isinstance(value, dict):
            return {filled(key): filled(each) for key, each in value.items()}
        return [filled(each) for each in value] if isinstance(value, list) else value

    def write(settings, of="both", signed="by another"):
        folder = tmp_path / "downloaded"
        shutil.copytree(own_run, folder)
        places = {"run": [folder], "checkpoint": [checkpoints(folder)[-1]]}
        places["both"] = places["run"] + places["checkpoint"]
        for place in places[of]:
            config = yaml.safe_load((place / "config.yaml").read_text())
            for key, value in filled(settings).items():
                *sections, leaf = key.split(".", 1)
                (config[sections[0]] if sections else config)[leaf] = value
                if key == "env.name":
                    config["env"] = {k: v for k, v in config["env"].items() if k in ("name", "kwargs")}
            (place / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
            if signed == "by another":
                content = manifest.read_manifest(place)
                with monkeypatch.context() as patch:
                    patch.setenv("XDG_CONFIG_HOME", str(tmp_path / "attacker"))
                    if content["kind"] == "checkpoint":
                        seal(place)
                    else:
                        files = {each: manifest.entry(place / each) for each in content["files"]}
                        manifest.write_manifest(place, "run", files)
            elif signed == "no":
                (place / "manifest.json").unlink()
        return folder, mark

    yield write
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def refused(capsys, *words, of=("names code to import", "--trust")):
    assert main(list(map(str, words))) == 2
    printed = capsys.readouterr().err
    assert all(each in printed for each in of), printed
    return printed


@pytest.mark.parametrize("signed", ["no", "by another", "before it was changed"])
@pytest.mark.parametrize("what", [*CODE, *REFUSED, *CALLED])
def test_named_code_is_not_imported(hostile, capsys, what, signed):
    folder, mark = hostile((CODE | REFUSED | CALLED)[what], signed=signed)
    before = set(sys.modules)
    if signed != "by another":
        # it does not match its manifest, so --trust is not enough
        why = "it has no manifest.json; --trust" if signed == "no" else "config.yaml has "
        refused(capsys, "eval", folder, of=["are damaged", why])
        assert not mark.exists()
        return
    assert str(checkpoints(folder)[-1] / "config.yaml") in refused(capsys, "eval", folder)
    refused(capsys, "eval", checkpoints(folder)[-1])
    refused(capsys, "compare", folder, folder)
    if what in ("env", "os.system", "VLA by its class", "settings of an env, deep"):
        refused(capsys, "train", "finetune", "--dry-run", f"pretrained={folder}")
        refused(capsys, "config", "finetune", f"pretrained={folder}")
    if what in ("policy", "VLA by a dotted class"):
        with pytest.raises(TrustError, match="names code to import"):
            load_policy(folder)
    page = RunFolder(folder, lambda *_: "")
    page.refresh(1)
    RunFolder.side_by_side([page])
    assert main(["runs", str(folder)]) == 0
    assert not mark.exists() and not {name for name in set(sys.modules) - before if name.startswith("hostile_")}


@pytest.mark.parametrize("signed", ["no", "by another"])
@pytest.mark.parametrize("what", [*CODE, *CALLED])
def test_trust_imports_named_code_and_is_remembered(hostile, capsys, what, signed):
    folder, mark = hostile((CODE | CALLED)[what], signed=signed)
    with suppress(TypeError):  # the named object is no env
        main(["eval", str(folder), "--trust"])
    printed = capsys.readouterr().err
    checkpoint = checkpoints(folder)[-1]
    assert f"trusted {checkpoint / 'config.yaml'}, which imports" in printed and f"signed '{checkpoint}'" in printed
    assert mark.exists()
    if what in CALLED:
        return
    main(["eval", str(folder)])
    assert "names code" not in capsys.readouterr().err
    # after moving the folder
    folder.rename(folder.with_name("elsewhere_now"))
    main(["eval", str(folder.with_name("elsewhere_now"))])
    assert "names code" not in capsys.readouterr().err
    # trust covers the config as it was, not later changes
    file = folder.with_name("elsewhere_now") / checkpoint.name / "config.yaml"
    file.write_text(file.read_text() + "# more\n")
    refused(capsys, "eval", file.parent, of=["is damaged: config.yaml has "])


def test_trust_without_a_key_is_reported_once(hostile, capsys, monkeypatch):
    folder, mark = hostile(CODE["policy"])
    monkeypatch.setenv("XDG_CONFIG_HOME", "/dev/null/none")
    main(["eval", str(folder), "--trust"])
    printed = capsys.readouterr().err
    assert mark.exists() and printed.count("trusted ") == printed.count("for this command only") == 1


def test_config_file_of_a_foreign_run_is_trusted_with_a_warning(hostile, capsys):
    folder, _ = hostile({"env.name": "{m}:Thing"})
    words = ["config", "finetune", "--config", str(folder / "config.yaml")]
    main(words)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("--config ")]
    assert f"is in '{folder}', which you did not sign: it is trusted like a Makefile, and imports env.name=" in line
    # one's own run, and a file outside runs
    manifest.sign(folder, "config.yaml")
    main(words)
    shutil.copy(folder / "config.yaml", folder.parent / "mine.yaml")
    main([*words[:-1], str(folder.parent / "mine.yaml")])
    assert "which you did not sign" not in capsys.readouterr().err


@pytest.mark.parametrize("what", [name for name in REFUSED if name.startswith(("os", "posix", "exec", "a b", "Popen"))])
def test_trust_does_not_call_builtins(hostile, capsys, what):
    folder, mark = hostile(REFUSED[what])
    assert main(["eval", str(folder), "--trust"]) == 2
    assert re.search("expected a class, or a function written in Python|first parameter must", capsys.readouterr().err)
    assert not mark.exists()


def test_given_settings_are_trusted(hostile, tmp_path):
    """The command line, Python, the file of --config."""
    folder, mark = hostile(CODE["env"])
    with pytest.raises(UserError, match="first parameter must be annotated"):
        load_config(folder / "config.yaml", inherit=False)
    assert mark.exists()


@pytest.mark.parametrize("what", ["policy", "VLA by a dotted class"])
def test_python_api_names_its_trust_argument(hostile, what):
    folder, mark = hostile((CODE | REFUSED)[what])
    with pytest.raises(TrustError, match=r"trust=True"):
        load_policy(folder)
    assert not mark.exists()
    with pytest.raises(UserError) as caught:
        load_policy(folder, trust=True)
    assert not isinstance(caught.value, TrustError) and mark.exists()
    with pytest.raises(UserError, match="has no world model"):
        load_world_model(folder)


def test_only_code_that_would_be_imported_needs_trust(hostile):
    """Loading a policy imports no env."""
    folder, mark = hostile({"env.name": "{m}:Thing", "rewards.{m}:term": 1.0})
    assert load_policy(folder).chunk == 1
    assert not mark.exists()


def test_trust_reports_all_named_code(hostile, capsys):
    """A later command may use more settings of the file."""
    folder, _ = hostile({"env.name": "{m}:Thing", "policy": {"name": "{m}:Thing"}})
    with suppress(UserError, TypeError):
        load_policy(folder, trust=True)
    printed = capsys.readouterr().err
    assert "imports env.name=" in printed and "policy.name=" in printed


def test_config_of_the_checkpoint_is_checked_too(hostile, capsys):
    """A run resumes with the config of its checkpoint if `pretrained` no longer exists."""
    folder, mark = hostile({"env.name": "{m}:Thing", "pretrained": "gone"}, of="checkpoint")
    refused(capsys, "config", "finetune", "pretrained=gone", f"output={folder}")
    assert not mark.exists()


@pytest.mark.parametrize("key", ["student.teacher", "rollout.imagined", "adversarial.student"])
def test_runs_named_by_settings_are_checked(hostile, capsys, key):
    settings = {"phase": "adversarial", "env.name": "{m}:Thing", "policy": {"name": "{m}:Thing"}}
    folder, mark = hostile(settings)
    phase = {"student.teacher": "student", "rollout.imagined": "finetune"}.get(key, "adversarial")
    refused(capsys, "config", phase, f"{key}={folder}")
    assert not mark.exists()


@pytest.mark.parametrize(
    "env",
    [
        {"name": "os:system", "task": [], "kwargs": {"command": "touch {mark}"}},
        {"name": "{m}:Thing", "task": ["a"]},
        {"name": "gym:{m}:Thing-v0", "task": ["a"]},
        {"name": "gym:CartPole-v1", "task": ["a"], "kwargs": {"inner": ["{m}:Thing"]}},
    ],
)
def test_datasets_are_checked(hostile, capsys, tmp_path, env):
    _, mark = hostile({})
    (module,) = os.listdir(tmp_path / "elsewhere")
    text = json.dumps({"env": env}).replace("{m}", module).replace("{mark}", str(mark))
    file = tmp_path / "demos" / "meta" / "sparring.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    words = ["train", "imitate", "--dry-run", f"imitate.demos={file.parents[1]}"]
    assert str(file) in refused(capsys, *words)
    assert not mark.exists()
    main([*words, "--trust"])
    assert "trusted " in capsys.readouterr().err
    assert manifest.is_signed(manifest.read_manifest(file.parents[1]))
    if env["name"].endswith(("Thing", "Thing-v0")):
        assert mark.exists()


def test_config_import_is_checked(hostile, capsys, tmp_path):
    _, mark = hostile({})
    (module,) = os.listdir(tmp_path / "elsewhere")
    (tmp_path / "theirs.yaml").write_text(f"env: {{name: '{module}:Thing'}}\n")
    refused(capsys, "config", "import", tmp_path / "theirs.yaml")
    assert not mark.exists()
    main(["config", "import", str(tmp_path / "theirs.yaml"), "--trust"])
    assert mark.exists() and "for this command only" in capsys.readouterr().err


def test_trust_does_not_hide_damage(hostile, capsys):
    folder, _ = hostile(CODE["env"], signed="by another")
    (checkpoints(folder)[-1] / "spec.json").write_text("{}")
    assert main(["eval", str(folder), "--trust"]) == 2
    assert "are damaged:\n  checkpoint-2: spec.json has" in capsys.readouterr().err


def test_manifest_with_files_outside_its_folder_is_refused(hostile, capsys):
    folder, mark = hostile(CODE["env"], signed="by another")
    file = checkpoints(folder)[-1] / "manifest.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"files": content["files"] | {"../../x": {}}}))
    assert main(["eval", str(folder)]) == 2
    assert "is not a manifest of format" in capsys.readouterr().err and not mark.exists()


OWN = {
    "env": {"env": {"name": "gym_doubles:Succeeds"}},
    "policy": {"policy": {"name": "doubles_memory:MemoryPolicy"}},
    "reward": {"rewards": {"terms": {"test_trust:one": 1.0}}},
}


def one(td):
    return td["is_first"].float()


@pytest.mark.parametrize("what", ["env", "reward"])
def test_own_runs_need_no_flag(tmp_path, capsys, what):
    folder = tmp_path / "run"
    config = SMALL | OWN[what] | {"output": str(folder)}
    run = Run(load_config(config), quiet=True)
    assert run.run()
    run.extend(load_config(config | {"training": {"iterations": 3}}))
    assert run.run()
    # resume, evaluation and fine-tuning
    words = ["train", "finetune", "--config", str(folder / "config.yaml"), "training.iterations=4"]
    assert main(words) == 0
    assert main(["eval", str(folder), "--episodes", "2"]) == 0
    assert main(["compare", str(folder), str(folder / "checkpoint-4"), "--episodes", "6"]) == 0
    assert main(["train", "finetune", "--dry-run", f"pretrained={folder}", "device=cpu", "--envs", "2"]) == 0
    moved = folder.rename(tmp_path / "moved")
    assert main(["eval", str(moved), "--episodes", "2"]) == 0
    assert load_policy(moved)
    # a checkpoint copied to another machine of the same user
    shutil.copytree(moved / "checkpoint-4", tmp_path / "sent")
    assert main(["eval", str(tmp_path / "sent"), "--episodes", "2"]) == 0
    for place in (moved, moved / "checkpoint-4"):
        content = manifest.read_manifest(place)
        assert manifest.is_signed(content) and not manifest.damage(place, content)
    assert not re.search("trust", capsys.readouterr().err)


def test_changed_config_of_an_own_run_is_refused(tmp_path, capsys):
    folder = tmp_path / "run"
    assert Run(load_config(SMALL | OWN["env"] | {"output": str(folder)}), quiet=True).run()
    file = checkpoints(folder)[-1] / "config.yaml"
    file.write_text(file.read_text().replace("gym_doubles:Succeeds", "gym_doubles:Counter"))
    for trust in ([], ["--trust"]):
        refused(capsys, "eval", folder, *trust, of=["config.yaml has "])


def test_run_without_manifests_is_signed_with_trust(own_run, tmp_path, capsys):
    """A run of an earlier version that names no code."""
    folder = tmp_path / "run"
    shutil.copytree(own_run, folder)
    for file in [folder / "manifest.json", *folder.glob("*/manifest.json")]:
        file.unlink()
    checkpoint = checkpoints(folder)[-1]
    refused(capsys, "eval", folder, of=["it has no manifest.json; --trust accepts it as it is"])
    with pytest.raises(UserError, match="has no manifest"):
        load_policy(folder)
    assert main(["eval", str(folder), "--trust"]) == 0
    assert f"trusted {checkpoint}, which had no manifest.json: signed" in capsys.readouterr().err
    assert main(["eval", str(folder)]) == 0 and load_policy(folder).chunk == 1
    assert "trust" not in capsys.readouterr().err
    # from now on damage is detected
    (checkpoint / "model.safetensors").write_bytes(b"torn")
    refused(capsys, "eval", checkpoint, "--trust", of=["model.safetensors has 4 bytes"])


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("file", ["config.yaml", "meta/sparring.json"])
def test_config_replaced_during_reading_is_refused(tmp_path, monkeypatch, file, trust):
    """An attacker may replace a file between reading and verification by the one that was signed."""
    path, words = tmp_path / file, {"env": {"name": "gym_doubles:Succeeds", "task": ["a"]}}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(words))
    assert manifest.sign(tmp_path, file)
    signed, hostile = path.read_bytes(), json.dumps(words).replace("Succeeds", "Counter").encode()
    # the function with which the config reads the file
    target = "sparring.config.text.read_small" if file == "config.yaml" else "sparring.config.inherit.read_small"
    monkeypatch.setattr(target, lambda *_: path.write_bytes(signed) and hostile)
    expected = (manifest.ManifestError, "changed after it was read") if trust else (TrustError, "gym_doubles:Counter")
    with trusting(trust), pytest.raises(expected[0], match=expected[1]):
        if file == "config.yaml":
            trusted_settings(tmp_path)
        else:
            inherited_settings("imitate", parse_overrides([f"imitate.demos={tmp_path}"]))
    assert manifest.is_signed(manifest.read_manifest(tmp_path))
    assert manifest.damage(tmp_path, manifest.read_manifest(tmp_path)) == []


def test_only_rank_0_signs(own_run, tmp_path, monkeypatch):
    folder = shutil.copytree(checkpoints(own_run)[-1], tmp_path / "copied")
    (folder / "manifest.json").unlink()
    for rank, signs in {"1": False, "0": True}.items():
        monkeypatch.setenv("RANK", rank)
        assert load_policy(folder, trust=True).chunk == 1
        assert (folder / "manifest.json").exists() == signs


def test_checkpoint_of_links_into_a_cache_is_signed(own_run, tmp_path, capsys):
    cache = shutil.copytree(checkpoints(own_run)[-1], tmp_path / "blobs")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for file in cache.iterdir():
        if file.name != "manifest.json":
            (folder / file.name).symlink_to(Path("..") / "blobs" / file.name)
    assert main(["eval", str(folder), "--trust"]) == 0
    assert f"signed '{folder}'" in capsys.readouterr().err
    assert main(["eval", str(folder)]) == 0 and load_policy(folder).chunk == 1
    # trust covers the files that the links lead to
    (cache / "model.safetensors").write_bytes(b"torn")
    refused(capsys, "eval", folder, of=["model.safetensors has 4 bytes"])


def test_checkpoint_that_cannot_be_signed_is_trusted_once(own_run, tmp_path, monkeypatch):
    shutil.copytree(own_run, tmp_path / "run")
    checkpoint = checkpoints(tmp_path / "run")[-1]
    (checkpoint / "manifest.json").unlink()
    monkeypatch.setattr("sparring.config.trust.sign", lambda *_: (_ for _ in ()).throw(PermissionError()))
    assert load_policy(checkpoint, trust=True).chunk == 1
    with pytest.raises(UserError, match="has no manifest"):
        load_policy(checkpoint)


def test_training_works_without_a_signing_key(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    manifest._warn_once.cache_clear()
    folder = tmp_path / "run"
    config = SMALL | OWN["env"] | {"output": str(folder), "training": {"save_every": 1, "iterations": 3}}
    assert Run(load_config(config | {"logging": {"console_level": "WARNING"}})).run()
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("the key that signs runs cannot be used") == 1
    content = manifest.read_manifest(folder)
    assert "hmac" not in content and not manifest.is_signed(content) and not manifest.damage(folder, content)
    refused(capsys, "eval", folder)
    # if nothing can be signed, --trust is valid for one command
    assert main(["eval", str(folder), "--trust", "--episodes", "2"]) == 0


def test_signing_key_is_created_once_and_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "a").write_text("x")
    # verification creates no key
    assert not manifest.is_signed({"hmac": "x", "files": {}}) and not manifest.key_file().exists()
    manifest.write_manifest(tmp_path, "run", {"a": manifest.entry(tmp_path / "a")})
    key = manifest.key_file()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and [key] == list(key.parent.iterdir())
    assert manifest.is_signed(manifest.read_manifest(tmp_path))
    key.write_text("ab" * 32)
    assert not manifest.is_signed(manifest.read_manifest(tmp_path))
    key.write_text("not a key")
    assert not manifest.is_signed(manifest.read_manifest(tmp_path))


def test_values_that_are_no_import_paths_are_accepted():
    words = "device=cuda:0 env.name=gym:CartPole-v1 output=/a/b:c pretrained=https://x/y logging.name=12:30 seed=1"
    for name in ("gym:sparring:sparring/lift_d0", "gym:ALE/Pong-v5", "tabletop"):
        refuse_code(Path(), "config.yaml", parse_overrides([*words.split(), f"env.name={name}"]))
    with pytest.raises(
        TrustError, match="'config.yaml' names code to import.*: env.name='?a:b'?, policy.model_class=c.D"
    ):
        refuse_code(Path(), "config.yaml", parse_overrides(["seed=1", "env.name=a:b", "policy.model_class=c.D"]))


@pytest.mark.parametrize("path", ["os:system", "builtins:exec", "os:path", "sys:argv", "string:digits"])
def test_only_classes_and_python_functions_are_resolved(path):
    with pytest.raises(UserError, match=f"env '{path}' is a .*; expected a class, or a function written in Python"):
        resolve(path, {}, "env")


# --- the working directory

LIBRARIES = ["torch", "yaml", "json", "numpy", "pydantic", "gymnasium", "wandb", "pandas", "tensorboard", "numba"]
LIBRARIES += ["sparring_envs", "sitecustomize_not", "argparse", "tensordict", "safetensors", "accelerate", "mujoco"]


def shell(folder, *words, script=None):
    """`sparring WORDS` in a folder, by `script` or by `python -m`."""
    start = [sys.executable, "-m", "sparring"] if script is None else [sys.executable, str(script)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    return subprocess.run([*start, *words], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("how", ["script", "module"])
def test_files_in_a_run_folder_do_not_shadow_libraries(own_run, tmp_path, how):
    folder, mark, script = tmp_path / "run", tmp_path / "mark", tmp_path / "bin" / "sparring"
    shutil.copytree(own_run, folder)
    attack = f"import pathlib; pathlib.Path({str(mark)!r}).write_text(__name__)\n"
    for name in [*LIBRARIES, "evil_plugin"]:
        (folder / f"{name}.py").write_text(attack)
    # files of the working directory that gymnasium and numba would read
    entry_points = folder / "evil-1.0.dist-info" / "entry_points.txt"
    entry_points.parent.mkdir()
    entry_points.write_text("[gymnasium.envs]\n__root__ = evil_plugin:register\n")
    (entry_points.parent / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (folder / ".numba_config.yaml").write_text("cache_dir: numba\ncache_locator_classes: evil_plugin.Locator\n")
    script.parent.mkdir()
    script.write_text("from sparring.cli.main import main\nraise SystemExit(main())\n")
    done = shell(folder, "eval", ".", "--episodes", "2", script=script if how == "script" else None)
    assert done.returncode == 0, done.stderr
    assert not mark.exists(), mark.read_text()
    assert not (folder / "numba").exists()
    # the command line cannot name a module of the run folder either
    done = shell(folder, "eval", ".", "env.name=evil_plugin:Env", script=script if how == "script" else None)
    assert done.returncode == 2 and not mark.exists()
    assert "Modules in a run folder are not imported" in done.stderr


MINE = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Mine(CartPoleEnv):
    def reset(self, **options):
        import beside_mine  # later than Mine itself
        return super().reset(**options)
"""
BRIEF = ["--envs", "2", "rollout.steps=8", "threads=1", "device=cpu", "training.iterations=1", "evaluation.episodes=2"]
BRIEF += ["rollout.render_episodes=0", "rollout.max_episode_steps=10", "evaluation.baseline=false"]
BRIEF += ["env.name=mine:Mine"]


@pytest.mark.parametrize(
    "more",
    [["env.vectorize=process", "env.workers=2"], ["rollout.mode=async"], ["--gpus", "2"]],
    ids=["workers", "async", "processes"],
)
def test_user_modules_in_the_working_directory_are_imported(tmp_path, more):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "beside_mine.py").write_text("")
    # installed packages come first, in all processes
    (tmp_path / "yaml.py").write_text("raise SystemExit('a file stood in for a library')")
    done = shell(tmp_path, "train", "finetune", *BRIEF, *more, "--output", "runs/a")
    assert done.returncode == 0, done.stderr
    if more[0] != "--gpus":
        done = shell(tmp_path, "eval", "runs/a", "--episodes", "2")
        assert done.returncode == 0 and "trust" not in done.stderr, done.stderr


def test_trust_ends_with_its_command(hostile):
    folder, _ = hostile(CODE["policy"])
    with trusting(False), pytest.raises(TrustError):
        load_policy(folder)


def test_prefixes_of_adapters_are_the_only_trusted_ones():
    assert set(SIMULATORS) == set(envs.SIMS)
    assert not _names_code(Setting("env.name", "metaworld:mt10", "config.yaml"))
    assert _names_code(Setting("env.name", "somebody:mt10", "config.yaml"))
