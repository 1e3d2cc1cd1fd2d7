"""Each fault of a policy gives one finding with its severity; the policy without it gives none."""

import re

import pytest

from sparring.cli.main import main

SMALL = ["rollout.n_envs=2", "rollout.steps=8"]
# class of broken_policies -> severity, what was checked, a part of the message
FAULTS = {
    "RedrawsNoise": ("error", "act and evaluate", "the parity gate refuses to train: drift "),
    "Exits": ("error", "act and evaluate", "the code ended the process: SystemExit: 0 ("),
    "ForgetsLogProb": ("error", "act and evaluate", "policy.complete: did not write 'log_prob'"),
    "ForgetsTrace": ("error", "act and evaluate", "policy.complete: did not write 'trace/z2'"),
    "NeverRandom": ("error", "policy", "noise_size is 0, so it cannot sample actions"),
    "NotFinished": ("error", "act and evaluate", "NotImplementedError ("),
    "ActsWithNaN": ("error", "act and evaluate", "policy.act: action holds NaN or infinity"),
    "ActsInHalf": ("error", "act and evaluate", "policy.act: action is torch.float16, expected torch.float32"),
    "TooFewActions": ("error", "act and evaluate", "policy.act: action has shape [2, 1, 1], expected [2, 1, 7]"),
    "FarOut": ("warn", "actions", "of the entries outside of [-1, 1]"),
    "CountsItsDecisions": ("error", "same decision", "act() gives another action for the same decision and noise"),
    "IgnoresItsNoise": ("error", "same decision", "act() gives the same actions for other noise"),
    "ReadsTheBatch": ("error", "batch", "from the same one in a batch of 8"),
    "ValuesTheBatch": ("error", "batch", "a decision alone differs by 0."),
    "SpareLayer": ("warn", "gradient", "2 of 15 weight tensors get none: spare.weight, spare.bias"),
    "Detaches": ("warn", "gradient", "actor."),
    "KeepsATensor": ("error", "save and load", "the loaded policy acts differently (by 0.1)"),
    "RefusesItsState": ("error", "save and load", "KeyError: 'head'"),
}


def run(capsys, *words):
    code = main(["check", *words, *SMALL])
    lines = capsys.readouterr().out.splitlines()
    found = [re.fullmatch(r"(ok   |note |warn |error) ([^:]+): (.*)", line) for line in lines]
    findings = [(match[1].strip(), match[2], match[3]) for match in found if match]
    return code, findings, [finding for finding in findings if finding[0] != "ok"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_gives_one_finding(capsys, name):
    code, _, wrong = run(capsys, f"broken_policies:{name}")
    severity, what, message = FAULTS[name]
    assert [found[:2] for found in wrong] == [(severity, what)], wrong
    assert message in wrong[0][2]
    assert code == (severity == "error")


@pytest.mark.parametrize(
    "words",
    [
        ["broken_policies:Healthy"],
        ["broken_policies:Remembers"],
        ["broken_policies:Confident", "env.name=gym:CartPole-v1"],
        ["broken_policies:VLA"],
        ["broken_policies:VLA", "policy.draws=batch"],
        ["broken_policies:FlowVLA"],
        ["actor_critic", "env.name=gym:CartPole-v1"],
        ["actor_critic", "policy.distribution=gsde", "policy.init_std=0.1", "rollout.action_steps=2"],
        ["actor_critic", "policy.distribution=tokens", "env.cameras=[head]", "env.image_size=36"],
        ["flow", "policy.horizon=4", "rollout.action_steps=2"],
        ["flow", "policy.method=fpo"],
        ["flow", "policy.method=flow_noise", "policy.consistency=0.5"],
    ],
    ids=lambda words: "-".join(words[:2]),
)
def test_a_healthy_policy_gives_none(capsys, words):
    code, findings, wrong = run(capsys, *words)
    assert code == 0 and wrong == []
    assert [what for _, what, _ in findings] == [
        *("policy", "act and evaluate", "update", "actions", "same decision", "batch", "gradient", "save and load"),
        "decision",
    ]


def test_the_class_of_a_vla_model_is_a_policy(capsys):
    _, findings, wrong = run(capsys, "broken_policies:SparesALayer")
    assert findings[0][2].startswith("vla: ") and findings[0][2].endswith("random weights (no policy.model_path)")
    assert wrong == [("warn", "gradient", "2 of 7 weight tensors get none: model.spare.weight, model.spare.bias")]
    # any torch module is one, so that the message names what it lacks
    _, _, wrong = run(capsys, "broken_policies:HasNoScores")
    assert [found[:2] for found in wrong] == [("error", "policy")]
    assert "does not have the interface of a VLA model" in wrong[0][2] and "HasNoScores" in wrong[0][2]


def test_a_policy_without_its_required_settings_fails(capsys):
    for name, setting in (("vla", "policy.model_class=package.module:Class"), ("pi0", "policy.model_path=FOLDER")):
        assert main(["check", name, *SMALL]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"error policy: '{name}' needs {setting.split('=')[0]}"
        assert lines[1].startswith(f"      fix: write: sparring check {name} {setting}") and len(lines) == 3


def test_native_vla_without_model_path_is_reported_as_untrained(capsys):
    code, findings, wrong = run(capsys, "native_vla", "env.cameras=[head]", "rollout.steps=4")
    assert code == 0 and wrong == []
    assert findings[0][2].endswith(" parameters, random weights (no policy.model_path)")
