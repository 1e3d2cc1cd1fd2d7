"""Instructions as token ids: from the list of an env by `observation/task`, or free `observation/instruction` text."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from doubles_native import Instructed, make_native
from doubles_vla import config as vla_config
from tensordict import TensorDict

from sparring.contract import EnvSpec
from sparring.errors import UserError
from sparring.policies.instructions import ByteTokenizer, Instructions
from sparring.policies.vla.interface import VLAObservations

TEXTS = ("push it", "lift the cube", "")
LISTED = EnvSpec({"task": ((), "int64")}, 2, instructions=TEXTS)
FREE = EnvSpec({"instruction": ((16,), "uint8")}, 2)


def utf8(texts, length=16) -> torch.Tensor:
    rows = np.zeros((len(texts), length), np.uint8)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text.encode())] = list(text.encode())
    return torch.from_numpy(rows)


def observed(**observation) -> TensorDict:
    return TensorDict({"observation": observation}, [len(next(iter(observation.values())))])


def test_free_text_has_the_tokens_of_the_listed_instruction():
    counted: list[str] = []

    def tokens_of(text: str) -> list[int]:
        counted.append(text)
        return ByteTokenizer(begin=256)(text)

    free, listed = Instructions(FREE, tokens_of, length=20, padding=7), Instructions(LISTED, ByteTokenizer(begin=256))
    asked = [1, 0, 1, 2, 0]
    td = observed(instruction=utf8([TEXTS[index] for index in asked]))
    ids, mask = free(td)
    expected, present = listed(observed(task=torch.tensor(asked)))
    assert ids.shape == mask.shape == (5, 20) and expected.shape == (5, 14)
    assert torch.equal(mask[:, :14], present) and not mask[:, 14:].any()
    assert torch.equal(ids[mask], expected[present]) and (ids[~mask] == 7).all()
    free(td)
    assert sorted(counted) == sorted(TEXTS)  # each text once
    assert free.texts(td) == listed.texts(observed(task=torch.tensor(asked))) == [TEXTS[index] for index in asked]
    assert (free.in_keys, listed.in_keys) == ([("observation", "instruction")], [("observation", "task")])


def test_without_either_every_decision_has_the_only_instruction():
    only = Instructions(EnvSpec({"state": ((2,), "float32")}, 2, instructions=("go",)), ByteTokenizer())
    ids, mask = only(observed(state=torch.zeros(3, 2)))
    assert ids.tolist() == [[*b"go"]] * 3 and mask.all() and only.in_keys == []


def free_spec() -> EnvSpec:
    spec = Instructed(1).spec
    entries = {key: kind for key, kind in spec.observation.items() if key != "task"}
    return replace(spec, observation=entries | {"instruction": ((16,), "uint8")}, instructions=("",), task_names=("",))


def both_observations(batch=6) -> tuple[TensorDict, TensorDict]:
    backend = Instructed(batch)
    backend.rng = np.random.default_rng(0)
    listed = TensorDict({}, [batch])
    for name, value in backend._observe().items():
        listed[tuple(name.split("/"))] = torch.from_numpy(value)
    free = listed.exclude("task")
    free["instruction"] = utf8([backend.spec.instructions[index] for index in listed["task"].tolist()])
    return TensorDict({"observation": listed}, [batch]), TensorDict({"observation": free}, [batch])


def test_a_native_vla_acts_on_free_text_as_on_listed_instructions():
    listed, free = make_native(), make_native(free_spec())
    free.load_state_dict(listed.state_dict(), strict=True)
    one, other = both_observations()
    with torch.no_grad():
        actions, same = listed.act(one)["action"], free.act(other)["action"]
    torch.testing.assert_close(same, actions, atol=1e-4, rtol=0)
    other["observation", "instruction"] = utf8(["lift it"] * 6)
    with torch.no_grad():
        assert (free.act(other)["action"] - actions).abs().max() > 1e-3
    other["observation", "instruction"] = utf8(["a text of 16 byt"] * 6)
    with pytest.raises(UserError, match="has 17 tokens, but policy.text_tokens="), torch.no_grad():
        make_native(free_spec(), text_tokens=16).act(other)


@pytest.mark.parametrize("tokenizer", ["text", "bytes"])
def test_a_vla_of_the_user_reads_free_text_as_language(tokenizer):
    one, other = both_observations()
    settings = vla_config("Samples", tokenizer=tokenizer)
    given, same = (
        VLAObservations(settings, spec)(td) for spec, td in ((Instructed(1).spec, one), (free_spec(), other))
    )
    if tokenizer == "text":
        assert list(same["language"]) == list(given["language"])
    else:
        assert [row[mask].tolist() for row, mask in zip(same["language"], same["language_mask"], strict=True)] == [
            row[mask].tolist() for row, mask in zip(given["language"], given["language_mask"], strict=True)
        ]
