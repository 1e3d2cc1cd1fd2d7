"""benchmarks/parity_vla.py: each kind of policy passes and its mutants do not."""

import pytest
import tiny_pi0
from parity_vla import cases, judged, measure
from vla_cases import KINDS, MUTANTS, rollout_of, settings_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_pi0.write(tmp_path_factory.mktemp("pi0"))


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_passes_with_lora_in_bf16_and_its_mutants_do_not(checkpoint, name):
    kind = KINDS[name]
    policy, buffer = rollout_of(kind, 16, "cpu", checkpoint, **settings_of(kind, True, "bf16"))
    lora = [p for n, p in policy.model.named_parameters() if "lora_" in n]
    assert lora and all(p.abs().max() > 0 for p in lora)
    values = measure(policy, buffer)
    assert judged(values, "bf16")["passes"] and values["dims"] == 0 and values["value"] < 0.01
    for mutant in MUTANTS.values():
        mutant(policy)
        verdict = judged(measure(policy, buffer), "bf16")
        assert not verdict["passes"] and verdict["over"]["drift"] > verdict["limits"]["drift"] == 0.05
        policy.eval()


def test_the_table_has_every_case():
    found = {(name, lora, precision) for name, _, lora, precision in cases("cpu", quick=False)}
    assert found == {(name, lora, p) for name in KINDS for lora in (False, True) for p in ("fp32", "bf16")}
    more = {(name, precision) for name, _, _, precision in cases("cuda", quick=False)} - {(n, p) for n, _, p in found}
    assert more == {("native_vla, tiny, graphs", "bf16")}


def test_a_difference_of_nan_does_not_pass():
    fine = dict.fromkeys(("drift", "sample", "dims", "score"), 0.0)
    assert judged(fine, "fp32")["passes"]
    assert list(judged(fine | {"drift": float("nan"), "dims": 1.0}, "fp32")["over"]) == ["drift", "dims"]
