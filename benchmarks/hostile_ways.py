"""Hostile folders for chaos_hostile.py: how each is made, and which commands read it."""

import io
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import chaos_corruption as corruption
import yaml

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests" / "doubles"), str(ROOT / "tests" / "config")]
MODULE = "of_a_stranger"
SHORT = ["device=cpu", "threads=1", "rollout.n_envs=2", "rollout.steps=8", "rollout.render_episodes=0"]
SHORT += ["training.iterations=1", "evaluation.episodes=2", "evaluation.baseline=false"]
PPO = ["policy.hidden=[8]", "ppo.mini_batch_size=8", "ppo.ppo_epochs=1"]
CARTPOLE = [*SHORT, *PPO, "env.name=gym:CartPole-v1"]


@dataclass
class Place:
    """Paths of the benchmark; commands get `bait`, and executed code creates `mark`."""

    work: Path

    def __post_init__(self) -> None:
        self.mark, self.bait, self.out = self.work / "mark", self.work / "bait", self.work / "out"
        self.run, self.teacher, self.demos = self.work / "good", self.work / "good_teacher", self.work / "good_demos"
        self.here = self.work / "here"
        package = self.work / "installed" / MODULE
        package.mkdir(parents=True)
        self.here.mkdir()
        self.source = package / "__init__.py"
        self.source.write_text(f"import pathlib\npathlib.Path({str(self.mark)!r}).touch()\nclass Thing: pass\n")
        (package / "inner.py").write_text("class Thing: pass\n")
        # new processes must find these modules, too
        for folder in (package.parent, ROOT / "src", ROOT / "tests" / "doubles"):
            sys.path.append(str(folder))
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

    def filled(self, value: object) -> object:
        """Fill in the placeholders of tests/config/test_trust.py: module, mark and source."""
        if isinstance(value, str):
            named = value.replace("{m}", MODULE).replace("{mark}", str(self.mark))
            return named.replace("{source}", str(self.source))
        if isinstance(value, dict):
            return {self.filled(key): self.filled(each) for key, each in value.items()}
        return [self.filled(each) for each in value] if isinstance(value, list) else value

    def short(self, argv: list[str]) -> str:
        """A command as text, without the work folder and the settings that shorten runs."""
        kept = [word for word in argv if word not in (*SHORT, *PPO)]
        return " ".join(kept).replace(f"{self.work}/", "")

    def make_folders(self) -> None:
        corruption.run_or_exit(["train", "finetune", "--output", str(self.run), *CARTPOLE, "training.iterations=2"])
        corruption.run_or_exit(["train", "teacher", "--output", str(self.teacher), *corruption.TEACHER])
        corruption.run_or_exit([*corruption.DEMOS, "--output", str(self.demos)])


@dataclass
class Bait:
    """A hostile folder: how it is made, the commands that read it, and one that must execute its code with --trust."""

    name: str
    make: Callable[[], None]
    commands: list[list[str]]
    trusted: list[str] | None = None


def sign_as_another_user(place: Place, *folders: Path) -> None:
    """Sign the folders with another user's key, as their author would."""
    mine = os.environ["XDG_CONFIG_HOME"]
    os.environ["XDG_CONFIG_HOME"] = str(place.work / "stranger")
    for folder in folders:
        sign(folder)
    os.environ["XDG_CONFIG_HOME"] = mine


def newest(folder: Path) -> Path:
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))


def sign(folder: Path) -> None:
    """Write a manifest that matches the present files."""
    from sparring.processes import manifest

    content = manifest.read_manifest(folder) or {"kind": "trusted"}
    about = {key: value for key, value in content.items() if key not in ("format", "kind", "files", "hmac")}
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != manifest.MANIFEST]
    kept = [folder / "config.yaml"] if content["kind"] == "run" else paths
    files = {str(path.relative_to(folder)): manifest.entry(path) for path in kept}
    if content["kind"] == "checkpoint":
        about["config"] = files["config.yaml"]["sha256"]
    manifest.write_manifest(folder, content["kind"], files, **about)


def with_settings(config: Path, settings: dict) -> None:
    content = yaml.safe_load(config.read_text())
    for key, value in settings.items():
        *sections, leaf = key.split(".", 1)
        if key == "env.name":
            content["env"] = {k: v for k, v in content["env"].items() if k in ("name", "kwargs")}
        (content[sections[0]] if sections else content)[leaf] = value
    config.write_text(yaml.safe_dump(content, allow_unicode=True))


def readers(place: Place, folder: Path, all_of_them: bool = True) -> list[list[str]]:
    """Commands that read a run folder of finetune."""
    run, newest_one, good = str(folder), str(newest(place.run).name), str(place.run)
    out = ["--output", str(place.out)]
    few = [["eval", run], ["train", "finetune", *SHORT, *out, f"pretrained={run}"], ["load_policy", run]]
    if not all_of_them:
        return few
    more = [["eval", f"{run}/{newest_one}"], ["eval", run, "--videos", "1"], ["eval", run, "--exploration"]]
    more += [["compare", run, good, "--episodes", "6"], ["compare", good, run, "--episodes", "6"]]
    more += [
        ["config", "finetune", f"pretrained={run}"],
        ["train", "finetune", "--dry-run", *SHORT, f"pretrained={run}"],
    ]
    more += [["train", "finetune", *CARTPOLE, "--output", run, "training.iterations=3"]]
    more += [["train", "finetune", *CARTPOLE, *out, "--resume", f"{run}/{newest_one}"]]
    more += [["train", "imitate", "--dry-run", *SHORT, f"imitate.demos={place.demos}", f"pretrained={run}"]]
    more += [["report", run, "--output", str(place.out.with_suffix(".html"))], ["runs", run], ["runs", "--verify", run]]
    return [*few, *more, ["prune", run, "--dry-run"], ["watch", run], ["check", run], ["demos", "show", run]]


def settings_baits(place: Place) -> Iterator[Bait]:
    from test_trust import CALLED, CODE, REFUSED

    def make(settings: dict, of: str, how: str) -> Callable[[], None]:
        def act() -> None:
            shutil.copytree(place.run, place.bait)
            places = {"run": [place.bait], "checkpoint": [newest(place.bait)]}
            places["both"] = places["run"] + places["checkpoint"]
            for folder in places[of]:
                with_settings(folder / "config.yaml", settings)
                if how == "sealed":
                    sign_as_another_user(place, folder)
                elif how == "bare":
                    (folder / "manifest.json").unlink()

        return act

    for name, settings in (CODE | REFUSED | CALLED).items():
        given = place.filled(settings)
        runs = ["eval", str(place.bait), "--trust"] if name in (*CODE, *CALLED) else None
        yield Bait(f"{name}, sealed", make(given, "both", "sealed"), readers(place, place.bait), runs)
        # fewer commands: those that start from the run or resume it
        few = readers(place, place.bait, all_of_them=False)
        yield Bait(f"{name}, without a manifest", make(given, "both", "bare"), few, runs)
        yield Bait(f"{name}, changed after this user signed it", make(given, "both", "changed"), few)
        started = given | {"pretrained": str(place.work / "gone")}
        resume = ["train", "finetune", *SHORT, "--output", str(place.bait), f"pretrained={place.work / 'gone'}"]
        yield Bait(f"{name}, of the run alone", make(started, "run", "sealed"), [resume, ["config", *resume[1:]]])
        yield Bait(f"{name}, in a world model", make_teacher(place, given), teacher_readers(place))


def make_teacher(place: Place, settings: dict) -> Callable[[], None]:
    """A folder of `train all` after its first phase."""

    def act() -> None:
        folder = place.bait / "teacher_rl"
        shutil.copytree(place.teacher, folder)
        for each in (folder, newest(folder)):
            with_settings(each / "config.yaml", settings)
            sign_as_another_user(place, each)

    return act


def teacher_readers(place: Place) -> list[list[str]]:
    run, short = str(place.bait / "teacher_rl"), [*SHORT, "--dry-run"]
    student, imagined = f"student.teacher={run}", f"rollout.imagined={run}"
    found = [["train", "student", *short, student], ["train", "finetune", *short, imagined], ["load_world_model", run]]
    found += [["eval", run, "--world-model"], ["config", "adversarial", f"adversarial.teacher={run}"]]
    return [*found, ["train", "adversarial", *short, f"adversarial.student={run}"]]


def folder_baits(place: Place) -> Iterator[Bait]:
    from test_trust import CODE

    hostile = place.filled(CODE["env"])
    assert isinstance(hostile, dict)
    pickles = {"a state dict": hostile_pickle(place, True), "a plain pickle": hostile_pickle(place, False)}

    def build(change: Callable[[Path, Path], None]) -> Callable[[], None]:
        def act() -> None:
            shutil.copytree(place.run, place.bait)
            change(place.bait, newest(place.bait))

        return act

    def pickled(content: bytes, file: str, kind: str) -> Callable[[Path, Path], None]:
        def change(run: Path, checkpoint: Path) -> None:
            if file.startswith("model"):
                (checkpoint / "model.safetensors").unlink()
            (checkpoint / file).write_bytes(content)
            content_of = json.loads((checkpoint / "manifest.json").read_text())
            (checkpoint / "manifest.json").write_text(json.dumps(content_of | {"kind": kind}))
            sign_as_another_user(place, checkpoint)

        return change

    def text_in(line: str) -> Callable[[Path, Path], None]:
        def change(run: Path, checkpoint: Path) -> None:
            for folder in (run, checkpoint):
                (folder / "config.yaml").write_text((folder / "config.yaml").read_text() + f"\n{line}\n")
                sign_as_another_user(place, folder)

        return change

    def replaced(how: str) -> Callable[[Path, Path], None]:
        """Hostile configs with manifests that this user signed, here or elsewhere."""

        def change(run: Path, checkpoint: Path) -> None:
            from sparring.processes import manifest

            signed = json.loads((checkpoint / "manifest.json").read_text())
            text = (checkpoint / "config.yaml").read_text()
            for folder in (run, checkpoint):
                with_settings(folder / "config.yaml", hostile)
            sign_as_another_user(place, run, checkpoint)
            theirs = json.loads((checkpoint / "manifest.json").read_text())
            file = checkpoint / "manifest.json"
            if how == "copied manifest":
                file.write_text(json.dumps(signed))
            elif how == "copied HMAC":
                file.write_text(json.dumps(theirs | {"hmac": signed["hmac"]}))
            elif how == "HMAC is no text":
                file.write_text(json.dumps(theirs | {"hmac": True}))
            elif how == "HMAC is empty":
                file.write_text(json.dumps(theirs | {"hmac": ""}))
            elif how == "twice the same key":
                file.write_text(json.dumps(theirs)[:-1] + f', "hmac": {json.dumps(signed["hmac"])}' + "}")
            elif how == "files beside files":
                file.write_text(json.dumps(theirs)[:-1] + f', "files": {json.dumps(signed["files"])}' + "}")
            elif how == "size and checksum of a link":
                (checkpoint / "own.yaml").write_text(text)
                file.write_text(json.dumps(signed))
                (checkpoint / "hostile.yaml").write_text((checkpoint / "config.yaml").read_text())
                (checkpoint / "config.yaml").unlink()
                (checkpoint / "config.yaml").symlink_to("hostile.yaml")
            elif how == "manifest is a link":
                file.unlink()
                file.symlink_to(newest(place.run) / "manifest.json")
            elif how == "manifest of the run":
                file.write_text((place.run / "manifest.json").read_text())
            elif how == "kind trusted":
                file.write_text(json.dumps(theirs | {"kind": "trusted"}))
            elif how == "no files":
                file.write_text(json.dumps(theirs | {"files": {}}))
            elif how == "files above it":
                path = os.path.relpath(newest(place.run) / "config.yaml", checkpoint)
                file.write_text(json.dumps(signed | {"files": signed["files"] | {path: manifest.entry(file)}}))
            elif how == "weights of this user":
                shutil.copy(newest(place.run) / "model.safetensors", checkpoint)
            elif how == "run is a link":
                shutil.rmtree(run)
                run.mkdir()
                (run / checkpoint.name).symlink_to(newest(place.run))
                (run / "config.yaml").write_text(yaml.safe_dump({"env": hostile}))
            elif how == "a config of a later update":
                later = checkpoint.with_name("checkpoint-9")
                shutil.copytree(newest(place.run), later)
                shutil.copy(checkpoint / "config.yaml", later)

        return change

    for name, content in pickles.items():
        for file in ("training_state.pt", "model.pt", "model.safetensors"):
            for kind in ("checkpoint", "trusted"):
                change = build(pickled(content, file, kind))
                yield Bait(f"{name} as {file}, {kind}", change, readers(place, place.bait))
        weights = place.work / f"{name.replace(' ', '_')}.pth"
        weights.write_bytes(content)
        start = ["train", "finetune", "--dry-run", *CARTPOLE, f"pretrained={weights}"]
        vla = ["train", "finetune", "--dry-run", *CARTPOLE, "policy.name=native_vla", f"policy.model_path={weights}"]
        yield Bait(f"{name} as weights", lambda: place.bait.mkdir(), [start, vla, ["load_policy", str(weights)]])
    for tag in ("python/object/apply:os.system ['touch {mark}']", "python/name:os.system", "python/module:{m}"):
        line = f"note: !!{place.filled(tag)}"
        yield Bait(f"YAML tag {tag}", build(text_in(line)), readers(place, place.bait))
        merged = f"env: {{<<: {{name: '{MODULE}:Thing'}}}}"
        yield Bait(f"YAML merge beside {tag}", build(text_in(merged)), readers(place, place.bait, False))
    ways = ["copied manifest", "copied HMAC", "HMAC is no text", "HMAC is empty", "twice the same key", "no files"]
    ways += ["files beside files", "size and checksum of a link", "manifest is a link", "manifest of the run"]
    ways += ["kind trusted", "files above it", "weights of this user", "run is a link", "a config of a later update"]
    for how in ways:
        yield Bait(how, build(replaced(how)), readers(place, place.bait))
    few = readers(place, place.bait, all_of_them=False)
    for name, content in SPECS.items():
        yield Bait(f"spec.json: {name}", build(with_file(place, "spec.json", content)), few)
    yield Bait("a deep index of weights", build(with_shards(place, index=b'{"weight_map": ' + DEEP)), few)
    yield Bait("weights that no manifest lists", build(with_shards(place, unlisted=hostile_pickle(place, True))), few)
    for name, about in MANIFESTS.items():
        yield Bait(f"manifest.json: {name}", build(with_manifest(place, hostile, about)), few)
    trusted = ["eval", str(place.bait / newest(place.run).name), "--trust"]
    yield Bait("links into a cache", build(linked(place, hostile)), few, trusted)


DEEP = b"[" * 3000
SPEC = '{"observation": {"state": [[4], "float32"]}, "action_dim": 1, "discrete_actions": 2'
SPECS = {"nothing": b"{}", "a list": b"[]", "an extra key": f'{SPEC}, "more": 1}}'.encode(), "deep": DEEP}
SPECS |= {
    "a list as observation": b'{"observation": [1], "action_dim": 1}',
    "not UTF-8": b"\xff" + SPEC.encode() + b"}",
}
SPECS |= {"a word as number": SPEC.replace(": 2", ': "two"').encode() + b"}", "17 MB": b" " * (17 << 20)}
# replacements (old, new) in the text of a manifest that another user signed
MANIFESTS = {
    "an HMAC of no letter": ('"hmac": "', '"hmac": "\\ud800'),
    "70 MB": ('"hmac": "', '"hmac": "' + "0" * 70_000_000),
}
MANIFESTS["a name of 5,000 letters"] = ('"files": {', '"files": {"' + "x" * 5000 + '": {"size": 1},')
MANIFESTS |= {f"{n} deep": ('"kind": ', f'"x": {"[" * n}{"]" * n}, "kind": ') for n in (100, 3000)}


def with_file(place: Place, name: str, content: bytes) -> Callable[[Path, Path], None]:
    def change(run: Path, checkpoint: Path) -> None:
        (checkpoint / name).write_bytes(content)
        sign_as_another_user(place, checkpoint)

    return change


def with_shards(place: Place, index: bytes = b"", unlisted: bytes = b"") -> Callable[[Path, Path], None]:
    """If they were read, `unlisted` weights would replace the shards."""

    def change(run: Path, checkpoint: Path) -> None:
        shard = (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00001.safetensors")
        names = json.loads((checkpoint / "manifest.json").read_text())["tensors"]
        usual = json.dumps({"weight_map": dict.fromkeys(names, shard.name)}).encode()
        (checkpoint / "model.safetensors.index.json").write_bytes(index or usual)
        sign_as_another_user(place, checkpoint)
        if unlisted:
            (checkpoint / "model.safetensors").write_bytes(unlisted)

    return change


def with_manifest(place: Place, hostile: dict, about: tuple[str, str]) -> Callable[[Path, Path], None]:
    def change(run: Path, checkpoint: Path) -> None:
        for folder in (run, checkpoint):
            with_settings(folder / "config.yaml", hostile)
            sign_as_another_user(place, folder)
            text = (folder / "manifest.json").read_text()
            assert about[0] in text
            (folder / "manifest.json").write_text(text.replace(*about))

    return change


def linked(place: Place, hostile: dict) -> Callable[[Path, Path], None]:
    """Links into a cache of blobs, as Hugging Face stores downloads, without a manifest."""

    def change(run: Path, checkpoint: Path) -> None:
        with_settings(checkpoint / "config.yaml", hostile)
        (checkpoint / "manifest.json").unlink()
        (run / "blobs").mkdir()
        for file in list(checkpoint.iterdir()):
            file.symlink_to(file.rename(run / "blobs" / file.name))

    return change


def hostile_pickle(place: Place, zipped: bool) -> bytes:
    import torch

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {place.mark}",)

    if not zipped:
        return pickle.dumps(Evil())
    buffer = io.BytesIO()
    torch.save({"model": Evil(), "x": torch.zeros(2)}, buffer)
    return buffer.getvalue()


def dataset_baits(place: Place) -> Iterator[Bait]:
    envs = {
        "os.system": {"name": "os:system", "task": [], "kwargs": {"command": "touch {mark}"}},
        "env": {"name": "{m}:Thing", "task": ["reach_d0"]},
        "env in a package": {"name": "{m}.inner:Thing", "task": ["reach_d0"]},
        "gymnasium id": {"name": "gym:{m}:Thing-v0", "task": ["reach_d0"]},
        "deep in settings": {"name": "gym:CartPole-v1", "task": ["a"], "kwargs": {"inner": ["{m}:Thing"]}},
        "key of settings": {"name": "gym:CartPole-v1", "task": ["a"], "kwargs": {"{m}:Thing": 1}},
        "a task": {"name": "tabletop", "task": ["{m}:Thing"]},
        "a camera": {"name": "tabletop", "task": ["reach_d0"], "cameras": ["{m}:Thing"]},
        "a list as name": {"name": ["{m}:Thing"], "task": ["reach_d0"]},
    }
    bait, good = str(place.bait), str(place.demos)
    imitate = ["train", "imitate", *SHORT, "imitate.steps_per_update=1", "rollout.max_episode_steps=2"]
    commands = [[*imitate, "--dry-run", f"imitate.demos={bait}"], ["config", "imitate", f"imitate.demos={bait}"]]
    commands += [[*imitate, "--dry-run", f"imitate.demos=[{each}]"] for each in (f"{bait},{good}", f"{good},{bait}")]
    commands += [[*imitate, f"imitate.demos={bait}", "--output", str(place.out)], ["demos", "show", bait]]
    commands += [
        [*corruption.DEMOS, "--output", bait],
        ["check", bait],
        ["runs", bait],
        ["report", bait],
        ["watch", bait],
    ]

    def make(env: dict, how: str) -> Callable[[], None]:
        def act() -> None:
            shutil.copytree(place.demos, place.bait)
            file = place.bait / "meta" / "sparring.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"env": env}))
            if how == "sealed":
                sign_as_another_user(place, place.bait)
            elif how == "bare":
                (place.bait / "manifest.json").unlink(missing_ok=True)

        return act

    for name, env in envs.items():
        given = place.filled(env)
        assert isinstance(given, dict)
        runs = [*commands[0], "--trust"] if name in ("env", "env in a package", "gymnasium id") else None
        yield Bait(f"dataset, {name}, sealed", make(given, "sealed"), commands, runs)
        yield Bait(f"dataset, {name}, without a manifest", make(given, "bare"), commands, runs)
        yield Bait(f"dataset, {name}, changed after this user signed it", make(given, "changed"), commands)
