"""`sparring train all`: order of phases, resume, settings of single phases."""

import json
import signal
import time
from pathlib import Path

import pytest
from small_runs import start

from sparring.cli.main import main
from sparring.config.schema import load_config
from sparring.config.text import Setting, parse_overrides
from sparring.runs import train_all as chain

pytestmark = pytest.mark.usefixtures("forked")
ROOT = Path(__file__).parents[2]


class Commands:
    """Records commands instead of running them; returns the exit codes `codes`, then 0."""

    def __init__(self, output: Path):
        self.output, self.made, self.codes = output, [], []

    def __call__(self, words: list[str]) -> int:
        self.made.append(words)
        code = self.codes.pop(0) if self.codes else 0
        if code == 0:
            (chain._folder_of(words[1], self.output) / "checkpoint-1").mkdir(parents=True, exist_ok=True)
        return code

    @property
    def phases(self) -> list[str]:
        return [words[1] for words in self.made]


@pytest.fixture
def commands(tmp_path, monkeypatch):
    commands = Commands(tmp_path)
    monkeypatch.setattr(chain, "_run", commands)
    monkeypatch.setattr(chain, "_summary", lambda output: "measures")
    return commands


def test_each_phase_starts_from_the_previous_one(commands, tmp_path, capsys):
    assert main(["train", "all", "--output", str(tmp_path), "--envs", "3", "--gpus", "2"]) == 0
    assert commands.phases == ["teacher", "student", "adversarial"]
    assert all(words[2:6] == ["--gpus", "2", "--resume", "auto"] for words in commands.made)
    assert all("rollout.n_envs=3" in words for words in commands.made)
    teacher, student, adversarial = (set(words) for words in commands.made)
    assert f"output={tmp_path}/teacher_rl" in teacher
    assert {f"student.teacher={tmp_path}/teacher_rl", f"output={tmp_path}/student_rl"} <= student
    assert f"adversarial.teacher={tmp_path}/teacher_rl" in adversarial
    assert f"adversarial.student={tmp_path}/student_rl" in adversarial
    assert capsys.readouterr().out.endswith("measures\n")


def test_settings_reach_their_phases():
    given = ["teacher.coloured=0.3", "teacher.training.iterations=7", "training.iterations=5", "student.num_episodes=9"]
    shares = {
        phase: [(s.key, s.value) for s in chain._settings_of(phase, parse_overrides(given), Path("out"))]
        for phase in ("teacher", "student", "adversarial")
    }
    common = [("teacher.coloured", 0.3), ("training.iterations", 5)]
    # the setting of the phase comes later and wins
    assert shares["teacher"] == [*common, ("training.iterations", 7), ("output", "out/teacher_rl")]
    assert shares["student"][:3] == [*common, ("num_episodes", 9)]
    assert shares["adversarial"][:2] == common and len(shares["adversarial"]) == 5


def test_phase_setting_of_a_file_wins(commands, tmp_path):
    file = tmp_path / "all.yaml"
    file.write_text("teacher: {training: {iterations: 7}}\ntraining: {iterations: 5}\n")
    assert main(["train", "all", "--output", str(tmp_path), "--config", str(file)]) == 0
    out = [[word for word in made if word.startswith("training.iterations")] for made in commands.made]
    assert [of[-1] for of in out] == ["training.iterations=7", "training.iterations=5", "training.iterations=5"]


def test_chain_resumes_in_the_stopped_phase(commands, tmp_path, capsys):
    words = ["train", "all", "--output", str(tmp_path)]
    commands.codes = [0, 130]
    assert main(words) == 130
    assert commands.phases == ["teacher", "student"]
    commands.made.clear()
    assert main(words) == 0
    assert commands.phases == ["student", "adversarial"]
    commands.made.clear()
    assert main(words) == 0 and commands.phases == []
    assert "phase 3 of 3: adversarial, done before" in capsys.readouterr().out
    # the phase itself refuses changed settings; then nothing has changed
    commands.codes = [2]
    assert main([*words, "student.seed=3"]) == 2 and commands.phases == ["student"]
    commands.made.clear()
    assert main(words) == 0 and commands.phases == []
    # if it accepts them, later phases start from scratch
    assert main([*words, "student.seed=3"]) == 0 and commands.phases == ["student", "adversarial"]
    assert [made[5] for made in commands.made] == ["auto", "never"]
    # settings of saving and evaluation do not affect later phases
    commands.made.clear()
    assert main([*words, "student.seed=3", "student.evaluation.episodes=7"]) == 0
    assert commands.phases == ["student"]


def test_restart_of_later_phases_survives_an_interruption(commands, tmp_path):
    words = ["train", "all", "--output", str(tmp_path)]
    assert main(words) == 0
    commands.made.clear()
    commands.codes = [0, 130]
    assert main([*words, "--resume", "never"]) == 130 and commands.phases == ["teacher", "student"]
    commands.made.clear()
    assert main(words) == 0
    # the restarted student resumes; the old adversarial is not used
    assert [(made[1], made[5]) for made in commands.made] == [("student", "auto"), ("adversarial", "never")]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["adversarial.wm_updates=3"], "wm_updates"),
        (["student.rewards.learning_progress=1"], "rewards.learning_progress"),
        (["--dry-run"], "--dry-run needs a single phase"),
        (["--resume", "outputs/x"], "name a phase to branch off"),
    ],
)
def test_invalid_arguments_are_refused_before_the_first_phase(commands, tmp_path, given, text, capsys):
    assert main(["train", "all", "--output", str(tmp_path), *given]) == 2
    assert text in capsys.readouterr().err and not commands.made


def test_quickstart_settings_are_accepted(commands, tmp_path):
    root = ROOT
    assert "sparring train all --config configs/quickstart.yaml" in (root / "quickstart.sh").read_text()
    assert main(["train", "all", "--output", str(tmp_path), "--config", str(root / "configs/quickstart.yaml")]) == 0
    teacher, _, adversarial = commands.made
    assert "teacher.gradient_steps=100" in teacher and "world_model.tokenizer_steps=500" in teacher
    assert "training.iterations=14" in teacher and "training.iterations=8" in adversarial


@pytest.mark.parametrize("phase", ["student", "adversarial"])
def test_documented_original_configs_load(phase):
    given = [Setting(f"{phase}.teacher", "outputs/teacher_rl", "here")]
    config = load_config(ROOT / f"configs/{phase}_original.yaml", given, inherit=False)
    training, rollout = config.training, config.rollout
    assert (config.phase, training.num_episodes, training.save_every, training.log_every) == (phase, 100, 50, 10)
    assert (rollout.n_envs, rollout.steps, rollout.max_episode_steps, rollout.action_steps) == (1, 50, 50, 1)
    assert (config.ppo.mini_batch_size, config.ppo.policy_lr) == (8, 1e-4)
    assert (config.rewards.name, config.rewards.divergence) == ("original", "original")
    if phase == "adversarial":
        assert (config.adversarial.batch_size, config.adversarial.learning_rate) == (8, 1e-4)


@pytest.mark.timeout(900)
def test_complete_chain_resumes_after_a_stop(tmp_path):
    command = (tmp_path, "student.training.iterations=30")
    process = start(*command)
    metrics = tmp_path / "student_rl/episode_metrics.jsonl"
    while process.poll() is None and not metrics.is_file():
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out = process.communicate()[0]
    assert process.returncode == 130, out
    assert "command resumes it" in out and json.loads((tmp_path / "all.json").read_text()).keys() == {"teacher", "crc"}
    process = start(*command)
    out = process.communicate()[0]
    assert process.returncode == 0, out
    assert "phase 1 of 3: teacher, done before" in out and "resumes from" in out
    for words in ("wrist: squared error on changed pixels", "touch an object", "episodes of earlier explorers"):
        assert words in out
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["adversarial_rl", "all.json", "student_rl", "teacher_rl"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--teacher_checkpoint", "outputs/x"], "`train all` trains its own teacher"),
        (["student.teacher=outputs/x"], "`train all` trains its own teacher"),
        (["env.image_size=32"], "too small for the 3 convolutions"),
    ],
)
def test_settings_invalid_for_a_later_phase_are_refused_first(commands, tmp_path, given, text, capsys):
    assert main(["train", "all", "--output", str(tmp_path), *given]) == 2
    assert text in capsys.readouterr().err and not commands.made
