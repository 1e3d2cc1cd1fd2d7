"""Runs every documented command; checks that every link and file named in the docs exists."""

import argparse
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny_pi0
import torch
from foreign_datasets import episodes, lerobot_v21
from metric_names import unexplained

import sparring.data
from sparring.cli.main import build_parser, main
from sparring.config.schema import load_config
from sparring.envs.env import make_env
from sparring.record.names import FLAT
from sparring.runs.summary import _next_commands as next_commands

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("README*.md"), ROOT / "CONTRIBUTING.md", *ROOT.glob("benchmarks/*.md")])
# except pages that the site generator creates
PAGES += sorted(page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "_generated")
TINY = ["rollout.steps=8", "ppo.mini_batch_size=32", "ppo.ppo_epochs=1", "imitate.steps_per_update=2"]
TINY += ["teacher.gradient_steps=2", "adversarial.wm_updates_per_iter=2", "adversarial.warmup_steps=0", "env.threads=1"]


# a part of a command -> the package that it needs, which is not among the test extras
NEEDS = {"LunarLander": "Box2D", "CarRacing": "Box2D", "HalfCheetah": "imageio", "_robotics": "gymnasium_robotics"}


def documented_commands() -> list[str]:
    """Lines that begin with `sparring` in bash blocks of all pages, and quickstart.sh's training, without repeats."""
    trains = re.findall(r"^sparring train .*", (ROOT / "quickstart.sh").read_text(), re.M)
    found = {line.removesuffix(' "$@"'): "quickstart.sh" for line in trains}
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S):
            for line in block.splitlines():
                if line.strip().startswith("sparring "):
                    found[line.split("  #")[0].strip()] = page
    return list(found)


def saved_files(page: Path) -> dict[str, str]:
    """Name and text of the files that readers of a page save."""
    return dict(re.findall(r"Save this as `(\w+\.py)`:\n\n```python\n(.*?)```", page.read_text(), re.S))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A user's folder with the runs, demonstrations and files that the documented commands refer to."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "configs").symlink_to(ROOT / "configs")
    # a pretrained model, and the example model of a page
    (folder / "examples").symlink_to(ROOT / "examples")
    # test_vla.py runs the example as users do
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpt_vla.py", str(folder / "outputs/gpt_vla")])
        runpy.run_path(str(ROOT / "examples/gpt_vla.py"), run_name="__main__")
    tiny_pi0.write(folder / "checkpoints/pi0", states=64, actions=7)
    for page in PAGES:
        for name, text in saved_files(page).items():
            (folder / name).write_text(text)
    page = (ROOT / "docs" / "rewards.md").read_text()
    (folder / "my_rewards.py").write_text(re.search(r"```python\n(.*?)```", page, re.S).group(1))
    output = str(folder / "outputs" / "finetune_rl")
    assert (
        main(
            [
                "train",
                "finetune",
                "--output",
                output,
                "--envs",
                "2",
                *TINY,
                "training.iterations=1",
                "rollout.render_episodes=0",
                "evaluation.episodes=2",
            ]
        )
        == 0
    )
    # a world model
    words = ["train", "teacher", *TINY, "training.iterations=1", "evaluation.episodes=2", "rollout.n_envs=2"]
    # one tokenizer step, so that the second gradient step trains the predictor
    words.append("world_model.tokenizer_steps=1")
    assert main([*words, "--output", str(folder / "outputs/teacher_rl")]) == 0
    (folder / "outputs/reach_wm").symlink_to("teacher_rl")
    # an explorer for that world model
    words = ["train", "student", *TINY, "training.iterations=1", "evaluation.episodes=2", "rollout.n_envs=2"]
    words += ["--teacher_path", str(folder / "outputs/teacher_rl"), "rollout.render_episodes=0"]
    assert main([*words, "--output", str(folder / "outputs/student_rl")]) == 0
    # demonstrations, by the first command of the docs
    demos = ["demos", "lift_d0", "--noise", "0.1", "--episodes", "2", "env.threads=1"]
    assert main([*demos, "--output", str(folder / "outputs/demos/lift_d0")]) == 0
    for colour in ("red", "blue", "green"):
        demos = ["demos", f"pick_{colour}_d0", "--episodes", "2", "env.threads=1", "env.control_mode=delta_ee_pos"]
        assert main([*demos, "--output", str(folder / f"outputs/demos/pick_{colour}_d0")]) == 0
    demos = ["demos", "lift_d0", "--episodes", "2", "env.threads=1", "env.control_mode=delta_ee_pos"]
    assert main([*demos, "--output", str(folder / "outputs/demos/lift_d0_ee")]) == 0
    lerobot_v21(folder / "outputs/demos/theirs", episodes(4))
    # a policy trained on them by imitation
    words = ["train", "imitate", f"imitate.demos={folder}/outputs/demos/lift_d0", *TINY, "training.iterations=1"]
    words += ["evaluation.episodes=2", "rollout.n_envs=2", "rollout.render_episodes=0", "evaluation.baseline=false"]
    assert main([*words, "--output", str(folder / "outputs/imitate_rl")]) == 0
    (folder / "outputs/from_state").symlink_to("imitate_rl")
    # each example of a page uses a separate folder
    for name in ("lift_25", "lift_vla"):
        shutil.copytree(folder / "outputs/demos/lift_d0", folder / "outputs/demos" / name)
    for name, options in (
        ("lift_20", ["lift_d0"]),
        ("stack_10", ["stack_d0", "--control-mode", "delta_ee_pos"]),
        ("stack_d0", ["stack_d0", "--control-mode", "delta_ee_pos"]),
    ):
        demos = ["demos", *options, "--episodes", "2", "env.threads=1"]
        assert main([*demos, "--output", str(folder / "outputs/demos" / name)]) == 0
    for name in ("lift_imitated", "vla_tasks_imitated"):
        shutil.copytree(folder / "outputs/imitate_rl", folder / "outputs" / name)
    shutil.copytree(folder / "outputs/finetune_rl", folder / "outputs/lift_finetuned")
    flow = ["policy.name=flow", "policy.width=32", "policy.image_features=8", "policy.channels=[4,4]"]
    assert main([*words, *flow, "--output", str(folder / "outputs/flow")]) == 0
    write_tutorial_outputs(folder)
    return folder


def write_tutorial_outputs(folder: Path) -> None:
    """The outputs of the tutorials' commands: new runs if needed, else copies of the runs above."""
    outputs = folder / "outputs"
    short = [*TINY, "training.iterations=1", "evaluation.episodes=2", "evaluation.baseline=false"]
    short += ["rollout.n_envs=2", "rollout.render_episodes=0"]
    vla = ["policy.name=vla", "policy.model_class=tiny_vla:TinyVLA", "policy.critic_parts=[value_head]"]
    demos = f"imitate.demos=[{outputs}/demos/pick_red_d0,{outputs}/demos/pick_green_d0]"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = ["train", "imitate", demos, *vla, "rollout.action_steps=5", *short]
        assert main([*words, "--output", str(outputs / "vla_imitate")]) == 0
    words = ["train", "finetune", f"pretrained={outputs}/flow", "env.reward=sparse", *short]
    assert main([*words, "--output", str(outputs / "stack_rl")]) == 0
    copies = {"quickstart/lift_d0": "finetune_rl", "lift_d0_joints": "finetune_rl", "stack_imitate": "flow"}
    copies |= {"vla_lora": "vla_imitate", "quickstart_all/adversarial_rl": "teacher_rl"}
    copies |= {f"quickstart_all/{phase}": phase for phase in ("teacher_rl", "student_rl")}
    for copy, run in copies.items():
        shutil.copytree(outputs / run, outputs / copy, symlinks=True)


def run_small(command: str, capsys) -> None:
    """Run a command in the folder of `trained`, at the smallest size."""
    words = shlex.split(command)[1:]
    for word, package in NEEDS.items():
        if word in command and not find_spec(package):
            pytest.skip(f"no {package}")
    if words[0] == "watch":  # it would not end; test_watch.py tests it
        assert build_parser().parse_args(words).runs
        return
    if words[0] == "train":
        gym = any(word.startswith("env.name=") or "configs/" in word for word in words)
        words += [] if "--dry-run" in words else ["--dry-run"]
        tiny = TINY[:-1] if gym else TINY
        grpo = {"ppo.mini_batch_size=32": "grpo.mini_batch_size=32", "ppo.ppo_epochs=1": "grpo.epochs=1"}
        words += [grpo.get(word, word) for word in tiny] if "algorithm=grpo" in words else tiny
        if "configs/quickstart.yaml" in words:  # as the teacher of `trained`
            words.append("world_model.tokenizer_steps=1")
        if "--gpus" in words:  # launched processes are tested in test_distributed.py
            at = words.index("--gpus")
            del words[at : at + 2]
    # the docs name checkpoints of longer runs than `trained`
    words = [re.sub(r"/checkpoint-[25]0$", "/checkpoint-1", word) for word in words]
    if words[:2] == ["check", "vla"]:
        words += TINY
    if words[0] in ("eval", "compare"):
        words += ["--episodes", "6"] + (
            [] if {*words} & {"--world-model", "--exploration"} else ["evaluation.baseline=false"]
        )
    if words[0] == "demos" and words[1] != "show":
        words += ["--episodes", "2", "--workers", "1", "env.threads=1"]
    assert main(words) == 0, capsys.readouterr().err
    if words[0] == "train":
        shown = (
            "\nloss: "
            if words[1] in ("imitate", "teacher", "wm")
            else "\nepisodes: "
            if "rollout" in words
            else "\nparity: "
        )
        assert shown in capsys.readouterr().out


@pytest.mark.parametrize("command", documented_commands())
def test_documented_command(command, trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    run_small(command, capsys)


@pytest.mark.parametrize("phase", ["finetune", "imitate", "teacher", "student"])
def test_commands_that_a_finished_run_prints_work(phase, trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    commands = next_commands(load_config(f"outputs/{phase}_rl/config.yaml"))
    assert len(commands) == 3
    for command in commands:
        run_small(command, capsys)


def test_documented_commands_are_found():
    commands = documented_commands()
    assert len(commands) >= 12
    assert {command.split()[1] for command in commands} >= {
        *("train", "eval", "compare", "report", "watch", "runs", "prune", "config", "tasks", "check", "demos")
    }


def test_every_command_is_on_the_commands_page():
    page = (ROOT / "docs/commands.md").read_text()
    (commands,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert [command for command in commands.choices if f"`{command}`" not in page] == []


def test_embodichain_config_is_accepted_unchanged(tmp_path, capsys):
    (tmp_path / "my_config.json").write_text("""{
      "trainer": {
        "buffer_size": 2048,
        "buffer_type": "standard",  // "standard" or "vla"
        "iterations": 500
      },
      "algorithm": {
        "name": "ppo",
        "cfg": {"learning_rate": 3e-4, "gamma": 0.99, "n_epochs": 10, "batch_size": 64}
      }
    }""")
    assert main(["config", "finetune", "--config", str(tmp_path / "my_config.json")]) == 0
    printed = capsys.readouterr().out
    for line in ("policy_lr: 0.0003 ", "gamma: 0.99 ", "ppo_epochs: 10 ", "mini_batch_size: 64 ", "size: 2048 "):
        assert f"  {line}" in printed
    assert "  iterations: 500 " in printed


def test_the_architecture_page_names_files_and_folders_that_exist():
    page, source = (ROOT / "docs/architecture.md").read_text(), ROOT / "src/sparring"
    files = set(re.findall(r"`([a-z_0-9]+/[a-z_0-9/]*\.py)`", page))
    assert len(files) > 40
    assert [file for file in sorted(files) if not (source / file).is_file() and not (ROOT / file).is_file()] == []
    listed = set(re.findall(r"^\| `([a-z_]+)/`, `", page, re.M))
    assert listed == {path.parent.name for path in source.glob("*/__init__.py")}
    # the one-hour reading path
    assert sum(map(int, re.findall(r"^\| \[.*\) \| (\d+) \|", page, re.M))) == 60


def test_image_of_an_update_equals_its_scripts_output():
    drawn = runpy.run_path(str(ROOT / "docs/images/update.py"))["draw"]()
    assert drawn == (ROOT / "docs/images/update.svg").read_text()


def test_links_and_images_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} -> {target}"


@pytest.mark.parametrize("phase", ["finetune", "teacher", "student", "imitate"])
def test_metrics_that_a_run_writes_are_explained(trained, phase):
    """docs/metrics.md lists every name of the table (test_metrics.py); test_adversarial.py checks that phase."""
    folder = trained / f"outputs/{phase}_rl"
    (line,) = map(json.loads, (folder / "episode_metrics.jsonl").read_text().splitlines())
    assert not unexplained(line) and set(FLAT) <= line.keys()
    (evaluation,) = map(json.loads, (folder / "evaluations.jsonl").read_text().splitlines())
    found = {key for key in evaluation if key.startswith("eval/")}
    names = {"finetune": "success_rate", "teacher": "head/psnr", "student": "contact", "imitate": "reward"}
    assert f"eval/{names[phase]}" in found and evaluation["update"] == 1


def test_both_readmes_have_the_same_commands_links_and_numbers():
    """Commands, their output, links and figures; comments and prose are translated."""
    english, chinese = ((ROOT / name).read_text() for name in ("README.md", "README.zh.md"))
    pages = [page.replace("README.zh.md", "README.md") for page in (english, chinese)]
    blocks = [re.sub(r" +# .*", "", "".join(re.findall(r"```(.*?)```", page, re.S))) for page in pages]
    assert blocks[0] == blocks[1] and "sparring train finetune" in blocks[0]
    targets = [sorted(re.findall(r"\]\(([^)]+)\)", page)) for page in pages]
    assert targets[0] == targets[1]
    rows = [[line for line in page.splitlines() if line.startswith("|")] for page in pages]
    assert len(rows[0]) == len(rows[1])
    for ours, theirs in zip(*rows, strict=True):
        assert sorted(re.findall(r"\d+(?:[.,]\d+)*", ours)) == sorted(re.findall(r"\d+(?:[.,]\d+)*", theirs)), theirs


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


def test_data_snippets_run_unchanged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    code = "\n".join(snippets("docs/data.md"))
    exec(compile(code, "docs/data.md", "exec"), names)
    # the page shows every public name of sparring.data, except one that has a separate page
    missing = set(sparring.data.__all__) - names.keys()
    assert missing == {"Demonstrations"}
    assert len(names["store"]) >= 16 and names["store"].episode(0).batch_size == (20,)
    assert names["ring"].sample(2).batch_size == (2,)
    names["store"].close()


@pytest.mark.parametrize("page", ["docs/metrics.md", "docs/outputs.md"])
def test_metrics_snippets_run_unchanged(page, trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    for code in snippets(page):
        if "pandas" not in code or find_spec("pandas"):
            exec(compile(code, page, "exec"), {})
    assert capsys.readouterr().out
    if shutil.which("jq"):
        for command in re.findall(r"^(?:tail -f \S+ \| )?(jq .*)$", (ROOT / page).read_text(), re.M):
            file = "" if command.endswith(".jsonl") else " outputs/teacher_rl/episode_metrics.jsonl"
            assert subprocess.run(command + file, shell=True, capture_output=True, check=True).stdout


def test_demonstration_snippet_runs(trained, monkeypatch):
    monkeypatch.chdir(trained)
    (code,) = [code for code in snippets("docs/demonstrations.md") if "sparring.data" in code]
    names: dict = {}
    # the dataset of this test has two episodes
    exec(compile(code.replace("(3)", "(1)"), "docs/demonstrations.md", "exec"), names)
    assert names["episode"]["next", "done"][-1]


def test_policy_of_the_docs_passes_the_check(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs/extending.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "class Linear(Policy)" in block)
    (tmp_path / "docs_models.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check", "docs_models:Linear", *TINY, "rollout.action_steps=3", "--rollout.n_envs", "4"]) == 0
    assert "ok    act and evaluate" in capsys.readouterr().out


# a change to a file of docs/tutorials/own_env.md or own_vla.md -> part of the error that the page explains
MISTAKES = [
    ("planar_reach.py", "(8,)", "(6,)", "has shape (8,)"),
    ("planar_reach.py", "super().reset(seed=seed)", "self.np_random = np.random.default_rng()", "the same seed"),
    ("planar_reach.py", "reached, False,", "False, False,", "rollout.max_episode_steps"),
    ("planar_reach.py", "- self.hand())", "* np.nan)", "NaN"),
    ("planar_reach.py", "reward, reached,", "[reward, 0], reached,", "expected a number"),
    ("planar_reach.py", "spaces.Box(-0.2, 0.2, (2,), np.float32)", "spaces.Text(3)", "Text"),
    ("planar_batch.py", ".astype(np.float32)}", "}", "torch.float64, expected torch.float32"),
    ("planar_batch.py", '["state"][ended]}', '["state"]}', "Step.final"),
    ("planar_batch.py", "config: PlanarBatchConfig", "config", "annotated"),
    ("tiny_vla.py", "def evaluate_actions(", "def score(", "evaluate_actions"),
    ("tiny_vla.py", "self.features(observations))\n", "self.features(observations))[:, :3]\n", "a decision takes 7"),
    ("tiny_vla.py", "log_prob(actions).sum(-1), dist", "log_prob(actions), dist", "log_prob has shape"),
    ("tiny_vla.py", "def sample(", "def draw(", "the same action"),
    ("tiny_vla.py", "return actions, distribution", "return actions, Normal(0.0, 2.0)", "parity"),
]


@pytest.mark.parametrize("file, right, wrong, words", MISTAKES)
def test_mistakes_that_the_tutorials_explain_are_reported(file, right, wrong, words, tmp_path, monkeypatch, capsys):
    """Each changed line of a tutorial's file makes `sparring check` print the error that the page explains."""
    page = ROOT / "docs/tutorials" / ("own_vla.md" if file == "tiny_vla.py" else "own_env.md")
    text = saved_files(page)[file]
    assert right in text
    module = f"{Path(file).stem}_{MISTAKES.index((file, right, wrong, words))}"
    (tmp_path / f"{module}.py").write_text(text.replace(right, wrong))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    classes = {"planar_reach.py": "PlanarReach", "planar_batch.py": "PlanarBatch", "tiny_vla.py": "TinyVLA"}
    name = f"{module}:{classes[file]}"
    limit = [] if "max_episode_steps" in words else ["rollout.max_episode_steps=50", "rollout.action_steps=2"]
    vla = ["env.cameras=[head,wrist]", "env.object_state=hidden", *TINY, "rollout.n_envs=4"]
    checked = ["vla", f"policy.model_class={name}", *vla] if file == "tiny_vla.py" else [name, *limit]
    assert main(["check", *checked]) != 0
    shown = capsys.readouterr()
    assert words in shown.out + shown.err


def test_both_envs_of_the_tutorial_are_equivalent(tmp_path, monkeypatch):
    """gymnasium env and Backend, in chunks of 3: equal observations and rewards for equal seeds and actions."""
    for name, text in saved_files(ROOT / "docs/tutorials/own_env.md").items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    names = ("planar_reach:PlanarReach", "planar_batch:PlanarBatch")
    envs = [make_env(load_config({"env": {"name": name}}).env, 8, 50) for name in names]
    now = [env.reset(seed=3) for env in envs]
    generator, ended = torch.Generator().manual_seed(0), 0
    for _ in range(60):
        action = 2 * torch.rand(8, 3, 2, generator=generator) - 1
        now = [env.step(td.set("action", action)) for env, td in zip(envs, now, strict=True)]
        first, second = (td.flatten_keys() for td in now)
        assert first.keys() == second.keys()
        assert all((first[key] == second[key]).all() for key in dict(first))
        ended += int(first["next.truncated"].sum()) + 1000 * int(first["next.success"].sum())
    # 180 steps of 8 robots: most episodes run out of time, some reach the target
    assert ended >= 1020
