"""A resume checks that the saved state fits the run; weights that are not finite are never saved."""

import json
import shutil

import pytest
import torch
from small_runs import config_in, seal
from tensordict import TensorDict

from sparring.algorithms.gradient_step import GradientStep
from sparring.errors import Diverged, UserError
from sparring.processes.distributed import Distributed
from sparring.runs import checkpoint as module
from sparring.runs.checkpoint import CheckpointError, checkpoints, damage_of
from sparring.runs.run import Run

PPO = {"mini_batch_size": 16, "ppo_epochs": 1}
TRAINING = {"iterations": 3, "save_every": 1, "keep_checkpoints": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoints of updates 2 and 3."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert Run(config_in(folder, training=TRAINING)).run()
    return folder


@pytest.fixture
def copied(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def further(folder, **more):
    return config_in(folder, training=TRAINING | {"iterations": 4}, **more)


def moments(state) -> dict:
    return state["phase"]["algorithm"]["optimizer"]["state"][0]


def put(*path, to):
    def edit(state):
        holder = state
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = to(holder[path[-1]]) if callable(to) else to

    return edit


OPTIMIZER = ("phase", "algorithm", "optimizer")
STATES = {
    "Adam NaN": (lambda s: moments(s)["exp_avg"].fill_(float("nan")), "NaN or infinite numbers in phase.algorithm.opt"),
    "Adam of another shape": (
        put(*OPTIMIZER, "state", 0, "exp_avg", to=torch.zeros(3, 3, 3)),
        r"exp_avg of parameter 0 is \[3, 3, 3\] torch.float32, expected \[",
    ),
    "Adam too short": (
        put(*OPTIMIZER, "state", 0, "exp_avg_sq", to=lambda moment: moment[:5]),
        r"exp_avg_sq of parameter 0 is \[5\]",
    ),
    "Adam float16": (
        put(*OPTIMIZER, "state", 0, "exp_avg", to=lambda moment: moment.half()),
        "is .* torch.float16, exp",
    ),
    "Adam's squares negative": (
        lambda s: moments(s)["exp_avg_sq"].fill_(-1.0),
        "exp_avg_sq of parameter 0 is negative",
    ),
    "Adam without a moment": (lambda s: moments(s).pop("exp_avg"), "moments of parameter 0 are missing"),
    "Adam a number": (put(*OPTIMIZER, "state", 0, "exp_avg", to=5), "the saved optimiser does not fit"),
    "groups gone": (put(*OPTIMIZER, "param_groups", to=lambda groups: groups * 2), "other groups"),
    "lr NaN": (put(*OPTIMIZER, "param_groups", 0, "lr", to=float("nan")), "lr is nan"),
    "base_lr": (put(*OPTIMIZER, "param_groups", 0, "base_lr", to=1e9), "base_lr is 1000000000.0, expected 0.001"),
    "uphill": (put(*OPTIMIZER, "param_groups", 0, "maximize", to=True), "maximize is True, expected False"),
    "amsgrad": (put(*OPTIMIZER, "param_groups", 0, "amsgrad", to=True), "amsgrad is True, expected False"),
    "no betas": (
        lambda s: s["phase"]["algorithm"]["optimizer"]["param_groups"][0].pop("betas"),
        "the saved optimiser does not fit .*: it has another format",
    ),
    "a list": (lambda s: [1], "holds a list, expected a dict of tensors"),
    "nothing": (lambda s: {}, "it holds nothing; expected phase, processes, pending, recorder"),
    "extra": (put("extra", to=1), "it holds .*extra; expected"),
    "no random state": (lambda s: s["processes"][0].pop("random"), "does not fit this run: KeyError"),
    "random bytes cut": (put("processes", 0, "random", "torch", to=lambda b: b[:100]), "does not fit this run: "),
    "robots of another shape": (
        put("processes", 0, "collector", "root", "observation", "state", to=lambda x: x[:1]),
        "does not fit this run: ",
    ),
    "two processes": (lambda s: s["processes"].append(s["processes"][0]), "was written by 2 process"),
}
for name in ("phase", "processes", "recorder", "pending"):
    for value in (None, [], {}, 5, "x"):
        if (name, value) not in (("pending", {}),):
            STATES[f"{name}={value!r}"] = (
                put(name, to=value),
                "cannot be used: |does not fit|was written by 0 process",
            )
for name in ("env_steps", "updates", "episodes"):
    for value in (-3, 10**30, "many", None, float("nan"), 3.5, True):
        STATES[f"{name}={value}"] = (
            put("phase", "progress", name, to=value),
            f"progress.{name} is .*, expected a count",
        )


@pytest.mark.parametrize(("edit", "message"), STATES.values(), ids=STATES.keys())
def test_state_that_does_not_fit_is_refused_before_use(copied, edit, message):
    file = copied / "checkpoint-3/training_state.pt"
    state = torch.load(file, weights_only=True)
    changed = edit(state)
    torch.save(changed if changed in ([1], {}) else state, file)
    seal(copied / "checkpoint-3")
    with pytest.raises(CheckpointError, match=message) as error:
        Run(further(copied))
    assert "to continue anyway, remove" in str(error.value)


def test_optimiser_state_of_another_shape_is_refused():
    parameter = torch.nn.Parameter(torch.zeros(1000))
    step = GradientStep([{"params": [parameter], "lr": 0.1}], Distributed("cpu"), 1.0, "ppo.policy_lr=0.1")
    step(TensorDict({}, [1]), parameter.sum())
    state = step.state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(UserError, match=r"exp_avg of parameter 0 is \[3\] torch.float32, expected \[1000\]"):
        step.load_state_dict(state)


# ---- damaged checkpoints


def flipped(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "training_state.pt", "config.yaml", "spec.json"])
def test_damaged_checkpoint_falls_back_to_the_newest_intact_one(trained, copied, name, monkeypatch):
    warnings = []
    monkeypatch.setattr(module.log, "warning", lambda words, *values: warnings.append(words % values))
    flipped(copied / "checkpoint-3" / name)
    damaged = (copied / "checkpoint-3" / name).read_bytes()
    run = Run(further(copied))
    assert run.phase.progress.updates == 2
    what = f"{name} does not match its checksum"
    assert warnings == [f"'{copied}/checkpoint-3' is damaged ({what}); checkpoint-2 is used instead"]
    assert (copied / "checkpoint-3" / name).read_bytes() == damaged
    assert run.run()
    # update 3 was repeated; the damaged checkpoint is kept
    assert (copied / "damaged-checkpoint-3" / name).read_bytes() == damaged
    assert [(path.name, damage_of(path)) for path in checkpoints(copied)] == [
        ("checkpoint-3", []),
        ("checkpoint-4", []),
    ]
    rows = [json.loads(line)["update"] for line in (copied / "episode_metrics.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3, 4]


def test_resume_reports_lost_and_altered_rows(copied, monkeypatch):
    warnings = []
    monkeypatch.setattr("sparring.runs.run.log.warning", lambda words, *values: warnings.append(words % values))
    file = copied / "episode_metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0].replace('"update": 1', '"update": 7') + lines[1] + lines[2][:50])
    assert Run(further(copied)).run()
    assert warnings == [
        f"'{file}': rows after update 2 are lost (1 of 3)",
        f"'{file}': row 1 is altered",
    ]
    assert [json.loads(line)["update"] for line in file.read_text().splitlines()] == [7, 2, 4]


def test_run_without_intact_checkpoint_does_not_restart(copied):
    for path in checkpoints(copied):
        flipped(path / "spec.json")
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="all of its checkpoints are damaged"):
        Run(further(copied))
    assert before == {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}


def test_named_damaged_checkpoint_is_refused(copied, tmp_path):
    flipped(copied / "checkpoint-3/model.safetensors")
    for more in ({"resume": str(copied / "checkpoint-3")}, {"pretrained": str(copied / "checkpoint-3")}):
        with pytest.raises(
            CheckpointError, match="checkpoint-3' is damaged: model.safetensors does not match its checksum"
        ):
            Run(further(tmp_path / "new", **more))
    # for the run folder, the previous checkpoint is used
    run = Run(further(tmp_path / "new", pretrained=str(copied)))
    before = module.read_weights(copied / "checkpoint-2/model.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.phase.model.state_dict().items())


# ---- values that are not finite


def break_model(run):
    next(run.phase.model.parameters()).data.view(-1)[0] = float("nan")


def break_moments(run):
    run.phase.algorithm.step.optimizer.state_dict()["state"][0]["exp_avg"][0] = float("inf")


def break_normalizer(run):
    next(buffer for name, buffer in run.phase.model.named_buffers() if name.endswith("var")).fill_(float("nan"))


def test_rank_with_weights_that_are_not_finite_raises(tmp_path):
    """The main process, whose weights are finite, raises no error."""
    run = Run(config_in(tmp_path / "run"))
    break_model(run)
    run.distributed.is_main = False
    with pytest.raises(Diverged, match="update 0 is not saved: NaN, infinite or impossible numbers in "):
        run.save()


@pytest.mark.parametrize("spoil", [break_model, break_moments, break_normalizer])
def test_values_that_are_not_finite_are_not_saved(tmp_path, spoil):
    config = config_in(
        tmp_path / "run",
        policy={"hidden": [8], "normalize_observations": True},
        training={"iterations": 9, "save_every": 1, "keep_checkpoints": 1},
    )
    run = Run(config)
    step = run.phase.step

    def step_that_diverges(fraction):
        metrics = step(fraction)
        if run.phase.progress.updates == 3:
            spoil(run)
        return metrics

    run.phase.step = step_that_diverges
    with pytest.raises(Diverged, match="update 3 is not saved: NaN, infinite or impossible numbers in ") as error:
        run.run()
    advice = "checkpoint-2 is kept; lower ppo.policy_lr, ppo.critic_lr, and start from it: --output DIR pretrained="
    assert f"{advice}{run.folder}/checkpoint-2" in str(error.value)
    assert error.value.exit_code == 1
    assert [(path.name, damage_of(path)) for path in checkpoints(run.folder)] == [("checkpoint-2", [])]
    assert not list(run.folder.glob(".partial-*"))
    assert Run(config).phase.progress.updates == 2
