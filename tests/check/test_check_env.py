"""Each fault of an env gives one finding with its severity; the env without it gives none."""

import re

import pytest
from PIL import Image

from sparring.check import env as checks
from sparring.check import processes, spaces
from sparring.cli.main import main

# class of broken_envs -> severity, what was checked, a part of the message
FAULTS = {
    "BeyondItsSpace": ("warn", "space of 'state'", "the space has -2 to 2"),
    "FractionsInIntegers": ("error", "space of 'front'", "float64 values such as 52.9, but the space is uint8"),
    "WrongShape": ("error", "contract", "has shape (3,) but its observation_space has shape (4,)"),
    "NotANumber": ("error", "contract", "holds NaN or inf"),
    "Huge": ("warn", "observations", "of observation/state reaches 1"),
    "NeverChanges": ("warn", "observations", "observation/state never changes"),
    "NoBounds": ("warn", "action space", "entries [0, 1] have no bounds, and are limited to [-1, 1]"),
    "EqualBounds": ("warn", "action space", "entries [2] have equal bounds, so they do nothing"),
    "FailsAtItsBounds": ("error", "bounds of actions", "ArithmeticError: the motor is too fast"),
    "IgnoresActions": ("warn", "bounds of actions", "actions change neither observations nor rewards"),
    "NotDeterministic": (
        "error",
        "determinism",
        "the same seed and actions gave another observation/depth/depth after",
    ),
    "DrawsAnotherPicture": ("error", "determinism", "the same seed and actions gave another observation/image/front"),
    "RoundsDifferently": ("warn", "determinism", "after other episodes, the same seed and actions give "),
    "RememberedByStep": ("error", "determinism", "in decision 1"),
    "MovesWhenDrawn": ("warn", "render", "drawing frames changes observation/depth/depth in decision 2"),
    "OneStart": ("warn", "determinism", "start alike, with other seeds too"),
    "NoReward": ("warn", "reward", "always 0, so there is nothing to learn"),
    "HugeReward": ("warn", "reward", "to 1e+05 a step"),
    "NoSuccess": ("note", "success", "the env reports none"),
    "NeverSucceeds": ("warn", "success", "and in none of 4 with the expert"),
    "NeverSucceedsAtRandom": ("note", "success", "episodes with random actions, which may be right"),
    "AlwaysSucceeds": ("warn", "success", "every episode is a success"),
    "ResetsItself": ("warn", "last observation", "times as much as any other, like a reset"),
    "TerminatesAtItsLimit": ("warn", "episodes end", "are terminated after 9 steps"),
    "TruncatesItsFailures": ("warn", "episodes end", "are truncated after"),
    "NeverEnds": ("error", "episodes end", "0 ended in 300 decisions of 4 robots"),
    "Black": ("error", "image/front", "black: all pixels are 0 to 0 of 255"),
    "OneColour": ("error", "image/front", "a single value (80) in every pixel"),
    "ZeroToOne": ("error", "image/front", "all pixels are 0 or 1 of 255"),
    "Frozen": ("warn", "image/front", "moments although the state changes"),
    "SameCameraTwice": ("warn", "image/side", "equal to image/front in all moments"),
    "Millimetres": ("warn", "depth/depth", "expected metres"),
    "NegativeDepth": ("warn", "depth/depth", "has negative values (-"),
    "OnePoint": ("error", "points", "all points are at one place"),
    "ForgetsItsGoal": ("error", "saved state", "after set_state, "),
    "CannotRestore": ("error", "saved state", "KeyError: 'position'"),
    "Slow": ("note", "speed", "100,000 steps take 1"),
    "KeepsAll": ("warn", "memory", "it grew by"),
    "HangsInClose": ("error", "close", "close() has not returned after 2 s"),
    "HangsInCloseWithoutExpert": ("error", "close", "close() has not returned after 2 s"),
    "Exits": ("error", "contract", "the code ended the process: SystemExit: 0 ("),
    "ExitsInClose": ("error", "close", "the code ended the process: SystemExit: 0 ("),
    "RaisesInClose": ("error", "close", "OSError: the port is busy"),
    "LeavesAForkedProcess": ("error", "close", "processes are left after close(): "),
    "LeavesAProcess": ("error", "close", "13 processes are left after close(): sleep"),
    "WrongDtype": ("error", "contract", "observation/state is torch.float64, expected torch.float32"),
    "FinalOfAll": ("error", "contract", "Step.final['state'] has 4 rows, but"),
    "FinalOfTooFew": ("error", "contract", "Step.final['state'] has 3 rows, but 4 episodes ended"),
    "FinalWithoutAnEntry": ("error", "contract", "Step.final has no 'privileged', but state"),
    "FinalOfTheNext": ("error", "last observation", "episodes is that of the next episode"),
    "FinalIsZero": ("error", "last observation", "the last observation/state of all"),
    "FinalOfTheStepBefore": ("error", "last observation", "is the one before the last step"),
    "FinalOfAllAtOnce": ("note", "Step.final", "all robots ended together"),
    "EndedIsNotWhatEnded": ("error", "contract", "Step.ended is [0, 1, 2, 3], but episodes of"),
    "RewardAfterTheEnd": ("error", "contract", "Step.reward is not 0 after the end of an episode"),
    "StopsEarly": ("error", "contract", "Step.executed is less than the chunk although no episode ended"),
    "DoesNotClip": ("error", "bounds of actions", "an action of 3 acts differently from one of 1"),
    "ChangesTheAction": ("error", "contract", "step() changed the action array that it was given"),
    "ReusesItsArrays": ("error", "contract", "step() changed observation/"),
    "StateIsNoCopy": ("error", "saved state", "after set_state, "),
}
# class of healthy_envs -> notes and warnings that it may have
HEALTHY = {
    "SharesMemory": [],
    "OffsetToTheGoal": [],
    "OwnMasses": [],
    "Contacts": [],
    "SucceedsInTheEnd": [],
    "SeesNoObject": [("note", "segmentation/head")],
    "Dithers": [("warn", "determinism")],
    "WakesSlowly": [("note", "success"), ("note", "speed"), ("note", "episodes end")],
}
# settings that a fault needs to show
SETTINGS = {name: ["rollout.action_steps=3"] for name in ("RewardAfterTheEnd", "StopsEarly")}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for name, number in {"_LEAST": 60, "_MOST": 300, "_SECONDS": 4.0}.items():
        monkeypatch.setattr(checks, name, number)
    for name, number in {"_PART": 25, "_CLOSE_S": 2.0, "_LEAVE_S": 0.3}.items():
        monkeypatch.setattr(processes, name, number)


def run(capsys, tmp_path, name, *words):
    """(exit code, [(severity, what, message)] that are not ok, all lines)."""
    code = main(["check", name, f"--output={tmp_path}", *words])
    lines = capsys.readouterr().out.splitlines()
    found = [re.fullmatch(r"(ok   |note |warn |error) ([^:]+): (.*)", line) for line in lines]
    findings = [(match[1].strip(), match[2], match[3]) for match in found if match]
    # every finding is followed by its fix, and nothing else is
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        assert line.startswith(("note ", "warn ", "error ")) == after.startswith("      fix: ")
    return code, [finding for finding in findings if finding[0] != "ok"], lines


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_gives_one_finding(capsys, tmp_path, name):
    code, findings, _ = run(capsys, tmp_path, f"broken_envs:{name}", *SETTINGS.get(name, []))
    severity, what, message = FAULTS[name]
    assert [found[:2] for found in findings] == [(severity, what)], findings
    assert message in findings[0][2]
    assert code == (severity == "error")


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_env_that_looks_faulty_gives_none(capsys, tmp_path, monkeypatch, name):
    monkeypatch.setattr(checks, "_SECONDS", 1.0 if name == "WakesSlowly" else 4.0)
    code, findings, _ = run(capsys, tmp_path, f"healthy_envs:{name}")
    assert code == 0 and [found for found in findings if found[:2] not in HEALTHY[name]] == []


@pytest.mark.parametrize("name", ["Healthy", "HealthyBackend"])
@pytest.mark.parametrize("words", [[], ["rollout.action_steps=3"]], ids=["steps", "chunks"])
def test_a_healthy_env_gives_none_and_fits_a_screen(capsys, tmp_path, name, words):
    code, findings, lines = run(capsys, tmp_path, f"broken_envs:{name}", *words)
    assert code == 0 and findings == [] and len(lines) <= 32
    assert re.fullmatch(r"no errors, no warnings, no notes in [\d.]+ s", lines[-1])


def test_a_healthy_env_in_worker_processes_gives_none(capsys, tmp_path):
    words = ["env.vectorize=process", "env.workers=2"]
    code, findings, lines = run(capsys, tmp_path, "broken_envs:Healthy", *words)
    assert code == 0 and findings == []
    assert lines[-2].endswith("s, no process left")


def test_the_contact_sheet_has_a_row_for_each_camera(capsys, tmp_path):
    _, _, lines = run(capsys, tmp_path, "broken_envs:Healthy")
    path = tmp_path / "broken_envs_Healthy.png"
    assert any(line.startswith(f"ok    contact sheet: {path}; look whether cameras") for line in lines)
    with Image.open(path) as sheet:
        width, height = sheet.size
    # two images, depth, points, and the video: 12 rows of pixels become 132, 160 stay
    assert height == 4 * (132 + 28) + (160 + 28) + 8
    # a title of 256 and up to six moments of 16 * 11 pixels
    assert width == 8 + (256 + 8) + 6 * (16 * 11 + 8)


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ((-1, -1), "ok    image/wall: it is the picture of the model's camera turned by 180 degrees; up is 0.93"),
        ((1, 1), "warn  image/wall: upside down: it is the picture of the model's camera as drawn, and its up"),
        ((-1, 1), "warn  image/wall: mirrored: it is the picture of the model's camera with its rows in reverse"),
        ((1, -1), "warn  image/wall: upside down: it is the picture of the model's camera with its columns in reverse"),
    ],
)
def test_images_are_compared_with_the_cameras_of_a_mujoco_model(capsys, tmp_path, turn, message):
    words = [f"env.kwargs.rows={turn[0]}", f"env.kwargs.columns={turn[1]}"]
    _, findings, lines = run(capsys, tmp_path, "broken_envs:InMuJoCo", *words)
    assert any(line.startswith(message) for line in lines), lines
    assert len(findings) == (turn != (-1, -1))


@pytest.mark.parametrize("name", ["reach_d0", "sparring/reach_d0"])
def test_a_built_in_task_gives_none(capsys, tmp_path, name):
    words = ["env.cameras=[head]", "env.image_size=32"]
    code, findings, lines = run(capsys, tmp_path, name, *words)
    assert code == 0 and findings == []
    assert (tmp_path / "reach_d0.png").stat().st_size > 1000
    assert any("with the expert" in line for line in lines)


def test_a_slow_env_is_checked_in_a_limited_time(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "_SECONDS", 0.2)
    monkeypatch.setattr(spaces, "_SECONDS", 0.2)
    _, findings, lines = run(capsys, tmp_path, "broken_envs:Slow")
    seconds = float(re.search(r"in ([\d.]+) s$", lines[-1])[1])
    # 0.04 s a step: 5 of 60 steps are compared with the spaces
    assert seconds < 5 and ("note", "episodes end") in [found[:2] for found in findings]
