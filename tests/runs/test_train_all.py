"""`sparring train all`: the phases follow each other, go on where they stopped, and get the settings meant for them."""

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
    """Instead of processes: what would have been run, with these exit codes, then 0."""

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


def test_each_starts_from_what_the_last_one_left(commands, tmp_path, capsys):
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


def test_settings_reach_the_phases_they_belong_to():
    given = ["teacher.coloured=0.3", "teacher.training.iterations=7", "training.iterations=5", "student.num_episodes=9"]
    shares = {
        phase: [(s.key, s.value) for s in chain._settings_of(phase, parse_overrides(given), Path("out"))]
        for phase in ("teacher", "student", "adversarial")
    }
    common = [("teacher.coloured", 0.3), ("training.iterations", 5)]
    # the phase's own comes later, and wins
    assert shares["teacher"] == [*common, ("training.iterations", 7), ("output", "out/teacher_rl")]
    assert shares["student"][:3] == [*common, ("num_episodes", 9)]
    assert shares["adversarial"][:2] == common and len(shares["adversarial"]) == 5


def test_a_phases_own_value_wins_in_a_file_too(commands, tmp_path):
    file = tmp_path / "all.yaml"
    file.write_text("teacher: {training: {iterations: 7}}\ntraining: {iterations: 5}\n")
    assert main(["train", "all", "--output", str(tmp_path), "--config", str(file)]) == 0
    told = [[word for word in made if word.startswith("training.iterations")] for made in commands.made]
    assert [of[-1] for of in told] == ["training.iterations=7", "training.iterations=5", "training.iterations=5"]


def test_it_goes_on_in_the_phase_where_it_stopped(commands, tmp_path, capsys):
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
    # with other settings the phase itself decides whether its folder may go on; while it does not, nothing has changed
    commands.codes = [2]
    assert main([*words, "student.seed=3"]) == 2 and commands.phases == ["student"]
    commands.made.clear()
    assert main(words) == 0 and commands.phases == []
    # when it does, what started from it is out of date
    assert main([*words, "student.seed=3"]) == 0 and commands.phases == ["student", "adversarial"]
    assert [made[5] for made in commands.made] == ["auto", "never"]
    # how often it saves or evaluates changes no weights
    commands.made.clear()
    assert main([*words, "student.seed=3", "student.evaluation.episodes=7"]) == 0
    assert commands.phases == ["student"]


def test_phases_that_start_anew_do_so_after_an_interruption_too(commands, tmp_path):
    words = ["train", "all", "--output", str(tmp_path)]
    assert main(words) == 0
    commands.made.clear()
    commands.codes = [0, 130]
    assert main([*words, "--resume", "never"]) == 130 and commands.phases == ["teacher", "student"]
    commands.made.clear()
    assert main(words) == 0
    # the student had begun anew and goes on; of the old adversarial nothing is taken
    assert [(made[1], made[5]) for made in commands.made] == [("student", "auto"), ("adversarial", "never")]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["adversarial.wm_updates=3"], "wm_updates"),
        (["student.rewards.learning_progress=1"], "rewards.learning_progress"),
        (["--dry-run"], "--dry-run needs a single phase"),
        (["--resume", "outputs/x"], "name a phase to branch off"),
    ],
)
def test_mistakes_are_told_before_anything_is_run(commands, tmp_path, given, said, capsys):
    assert main(["train", "all", "--output", str(tmp_path), *given]) == 2
    assert said in capsys.readouterr().err and not commands.made


def test_the_quickstarts_settings_are_accepted(commands, tmp_path):
    root = ROOT
    assert "sparring train all --config configs/quickstart.yaml" in (root / "quickstart.sh").read_text()
    assert main(["train", "all", "--output", str(tmp_path), "--config", str(root / "configs/quickstart.yaml")]) == 0
    teacher, _, adversarial = commands.made
    assert "teacher.gradient_steps=100" in teacher and "world_model.tokenizer_steps=500" in teacher
    assert "training.iterations=14" in teacher and "training.iterations=8" in adversarial


@pytest.mark.parametrize("phase", ["student", "adversarial"])
def test_the_originals_values_are_a_preset(phase):
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
def test_the_whole_chain_with_a_stop_in_the_middle(tmp_path):
    command = (tmp_path, "student.training.iterations=30")
    process = start(*command)
    metrics = tmp_path / "student_rl/episode_metrics.jsonl"
    while process.poll() is None and not metrics.is_file():
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    told = process.communicate()[0]
    assert process.returncode == 130, told
    assert "command resumes it" in told and json.loads((tmp_path / "all.json").read_text()).keys() == {"teacher", "crc"}
    process = start(*command)
    told = process.communicate()[0]
    assert process.returncode == 0, told
    assert "phase 1 of 3: teacher, done before" in told and "resumes from" in told
    for words in ("wrist: squared error on changed pixels", "touch an object", "episodes of earlier explorers"):
        assert words in told
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["adversarial_rl", "all.json", "student_rl", "teacher_rl"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--teacher_checkpoint", "outputs/x"], "`train all` trains its own teacher"),
        (["student.teacher=outputs/x"], "`train all` trains its own teacher"),
        (["env.image_size=32"], "too small for the 3 convolutions"),
    ],
)
def test_what_the_second_phase_would_refuse_is_told_before_the_first(commands, tmp_path, given, said, capsys):
    assert main(["train", "all", "--output", str(tmp_path), *given]) == 2
    assert said in capsys.readouterr().err and not commands.made
