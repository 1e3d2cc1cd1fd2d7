"""The native VLA's network: attention, the cache, its sizes, and equality with transformers' pi0."""

import pytest
import torch
from doubles_native import INSTRUCTIONS, SIZES, Instructed, make_inputs, make_model, shake
from tensordict import TensorDict

from sparring.contract import EnvSpec
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.policies.configs import LoraConfig
from sparring.policies.instructions import ByteTokenizer, Instructions
from sparring.policies.lora import adapt, merge
from sparring.policies.native.checkpoint import _from_transformers, read_model, save_model, to_transformers
from sparring.policies.native.config import PRESETS, NativeVLAConfig
from sparring.policies.native.model import NativeModel, attend
from sparring.policies.native.policy import NativeVLA, _FileTokenizer
from sparring.policies.weights import load_strictly

# ---- attention


def test_attention_equals_attention_per_head_with_shared_keys():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    seen = torch.tensor([[True] * 5, [True, True, False, True, False]])
    out = attend(q, k, v, seen).view(2, 3, 4, 8)
    for row in range(2):
        for head in range(4):
            keys, values = k[row, head // 2][seen[row]], v[row, head // 2][seen[row]]
            expected = torch.softmax(q[row, :, head] @ keys.T / 8**0.5, -1) @ values
            torch.testing.assert_close(out[row, :, head], expected)


def test_each_token_attends_to_the_documented_tokens():
    """Each input is changed in turn; the tokens that change with it attend to it."""
    model, inputs = make_model(memory_size=3), make_inputs(memory=True)
    x, t = torch.randn(3, 4, 8), torch.full((3,), 0.5)
    with torch.no_grad():
        prefix = model.prefix(inputs)
        velocity = model.velocity(x, t, prefix)
        # the last layer's values: of 8 patches, 7 words, state, memory
        last = prefix.values[:, -1, 0, : 8 + 7 + 2]
        for name in ("state", "memory", "images", "tokens"):
            moved = inputs._replace(**{name: getattr(inputs, name) + 1})
            other = model.prefix(moved)
            difference = (other.values[:, -1, 0, : 8 + 7 + 2] - last).abs().amax(-1)
            expert_only = name in ("state", "memory")
            # images and words attend to neither state nor memory; state and memory attend to everything
            assert (difference[:, :8].max() == 0) == expert_only
            assert difference[:, 15:].min() > 1e-6
            assert (model.velocity(x, t, other) - velocity).abs().amax(2).min() > 1e-7
        # every action attends to every other
        for step in range(4):
            nudged = x.clone()
            nudged[:, step] += 1
            assert (model.velocity(nudged, t, prefix) - velocity).abs().amax(2).min() > 1e-7


def test_keys_are_padded_to_a_multiple_of_8_and_the_padding_is_masked():
    model, inputs = make_model(), make_inputs()
    with torch.no_grad():
        prefix = model.prefix(inputs)
        # 8 patches, 7 words, the state: 16; one more word makes 17, padded to 24
        longer = inputs._replace(
            tokens=torch.cat([inputs.tokens, inputs.tokens[:, :1]], 1), text=torch.ones(3, 8, dtype=torch.bool)
        )
        filled = model.prefix(longer)
        assert prefix.mask.shape[1] == 16 and filled.mask.shape[1] == filled.keys.shape[3] == 24
        assert filled.mask.tolist() == [[True] * 17 + [False] * 7] * 3 and filled.keys[:, :, :, 17:].eq(0).all()
        x, t = torch.randn(3, 4, 8), torch.rand(3)
        expected = model.velocity(x, t, filled)
        filled.keys[:, :, :, 17:], filled.values[:, :, :, 17:] = 1.0, 1.0
        torch.testing.assert_close(model.velocity(x, t, filled), expected)


@pytest.mark.parametrize("more", [1, 5])
def test_padding_of_a_text_changes_nothing(more):
    model, inputs = make_model(), make_inputs()
    noise = torch.randn(3, 4, 8)
    padding = torch.full((3, more), 99)
    longer = inputs._replace(
        tokens=torch.cat([inputs.tokens, padding], 1), text=torch.cat([inputs.text, torch.zeros_like(padding) > 0], 1)
    )
    with torch.no_grad():
        prefix, padded = model.prefix(inputs), model.prefix(longer)
        torch.testing.assert_close(padded.features, prefix.features)
        torch.testing.assert_close(model.sample(longer, noise, 4), model.sample(inputs, noise, 4))
        # nor do the tokens in the padding
        other = inputs._replace(tokens=torch.where(inputs.text, inputs.tokens, 5))
        torch.testing.assert_close(model.sample(other, noise, 4), model.sample(inputs, noise, 4))


def test_a_state_and_actions_are_padded_with_zeros():
    model, inputs = make_model(), make_inputs()
    padded = inputs._replace(state=torch.nn.functional.pad(inputs.state, (0, 1)))
    x, t = torch.randn(3, 4, 5), torch.rand(3)
    with torch.no_grad():
        prefix = model.prefix(inputs)
        assert torch.equal(prefix.keys, model.prefix(padded).keys)
        whole = model.velocity(torch.nn.functional.pad(x, (0, 3)), t, prefix)
        assert torch.equal(model.velocity(x, t, prefix), whole[..., :5]) and whole.shape[-1] == 8


# ---- the cache


def test_denoising_several_states_in_one_pass_equals_one_by_one():
    policy = NativeVLA(NativeVLAConfig(), Instructed(1).spec, 4).eval()
    shake(policy.model)
    _, prefix = policy.encode(Env(Instructed(3)).reset(0))
    x, t = torch.randn(3, 5, 4, 3), torch.rand(3, 5)
    with torch.no_grad():
        at_once = policy.denoise(x.flatten(0, 1), t.flatten(), prefix.repeat_interleave(5, 0)).view_as(x)
        for state in range(5):
            torch.testing.assert_close(at_once[:, state], policy.denoise(x[:, state], t[:, state], prefix))
        rows = torch.tensor([2, 0])
        torch.testing.assert_close(at_once[rows, 1], policy.denoise(x[rows, 1], t[rows, 1], prefix[rows]))


def test_features_are_the_mean_of_the_outputs_of_images_and_words():
    model, inputs = make_model(), make_inputs()
    hidden = []
    model.trunk_norm.register_forward_hook(lambda _, inputs, output: hidden.append(output))
    with torch.no_grad():
        features = model.prefix(inputs).features
        assert torch.equal(model.features(inputs), features)
    for row, length in enumerate((7, 4, 1)):
        torch.testing.assert_close(features[row], hidden[0][row, : 8 + length].mean(0))


# ---- sizes


@pytest.mark.parametrize(
    ("preset", "least", "most"), [("tiny", 1e6, 3e6), ("small", 50e6, 100e6), ("pi0", 3.2e9, 3.3e9)]
)
def test_presets_have_the_documented_size(preset, least, most):
    with torch.device("meta"):
        model = NativeModel(PRESETS[preset])
    assert least <= sum(weight.numel() for weight in model.parameters()) <= most


# ---- transformers' pi0


def pi0_of(model):
    pytest.importorskip("transformers", minversion="5.17")
    return to_transformers(model)


def pi0_inputs(pi0, inputs, vocabulary):
    """The same inputs in the format of transformers."""
    batch, cameras = inputs.images.shape[:2]
    patches = cameras * (SIZES.image_size // SIZES.patch_size) ** 2
    tokens = torch.cat([torch.full((batch, patches), vocabulary), torch.where(inputs.text, inputs.tokens, 0)], 1)
    mask = torch.cat([torch.ones(batch, patches, dtype=torch.int64), inputs.text.long()], 1)
    state = torch.nn.functional.pad(inputs.state, (0, SIZES.max_state_dim - inputs.state.shape[1]))
    dtype = pi0.dtype
    return {
        "state": state.to(dtype),
        "input_ids": tokens,
        "pixel_values": inputs.images.to(dtype),
        "attention_mask": mask,
        "pixel_attention_mask": torch.ones(batch, cameras, dtype=torch.bool),
    }


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_transformers_pi0_gives_the_same_actions(dtype, tolerance):
    model, inputs = make_model(), make_inputs()
    pi0 = pi0_of(model.to(dtype))
    pi0.config.chunk_size = 4
    noise, t = torch.randn(3, 4, 8), torch.tensor([1.0, 0.4, 0.1])
    given = pi0_inputs(pi0, inputs, 300)
    with torch.no_grad():
        velocity = model.velocity(noise, t, model.prefix(inputs))
        expected = pi0(noise=noise.to(dtype), timestep=t, **given).logits.float()
        assert expected.abs().mean() > 0.05
        assert (velocity - expected).abs().max() < tolerance * expected.abs().max()
        actions = model.sample(inputs, noise, 10)
        expected = pi0.sample_actions(noise=noise.to(dtype), num_steps=10, **given).float()
        assert (actions - expected).abs().max() < tolerance * expected.abs().max()


def test_conversion_to_pi0_and_back_keeps_all_weights(tmp_path):
    model = make_model()
    pi0 = pi0_of(model)
    for source in (pi0, tmp_path):
        pi0.save_pretrained(tmp_path)
        weights, sizes = _from_transformers(source)
        assert sizes == model.sizes and weights.keys() == model.state_dict().keys()
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_conversion_keeps_weights_of_mixed_precision():
    model = make_model()
    model.vision.bfloat16()
    weights, _ = _from_transformers(pi0_of(model))
    assert all(torch.equal(weights[name], value.float()) for name, value in model.state_dict().items())


def test_a_model_with_adapters_is_not_written_until_they_are_merged(tmp_path):
    pytest.importorskip("peft")
    model, inputs = make_model(), make_inputs()
    adapt(model, LoraConfig(lora_r=2))
    shake(model)
    for write in (lambda: save_model(model, tmp_path), lambda: to_transformers(model)):
        with pytest.raises(UserError, match="has LoRA adapters.*sparring.policies.lora.merge"):
            write()
    assert not any(tmp_path.iterdir())
    before = model.features(inputs)
    merge(model)
    save_model(model, tmp_path)
    again = make_model()
    load_strictly(again, read_model(tmp_path).weights, str(tmp_path))
    torch.testing.assert_close(again.features(inputs), before, atol=1e-4, rtol=1e-4)


def test_a_checkpoint_of_transformers_loads_as_a_policy(tmp_path):
    model = make_model()
    pi0_of(model).save_pretrained(tmp_path)
    spec = Instructed(1).spec
    with pytest.raises(UserError, match="tokenizer.json .*PaliGemma's for pi0"):
        NativeVLA(NativeVLAConfig(model_path=str(tmp_path)), spec, 4)
    policy = NativeVLA(NativeVLAConfig(model_path=str(tmp_path), tokenizer="bytes"), spec, 4)
    assert policy.model.sizes == model.sizes
    assert torch.equal(policy.model.expert[1].gate_up.weight, model.expert[1].gate_up.weight)


def test_a_pi0_with_other_constants_is_refused():
    pi0 = pi0_of(make_model())
    pi0.config.max_period = 5.0
    with pytest.raises(UserError, match="max_period is 5.0, expected 4.0"):
        _from_transformers(pi0)
    with pytest.raises(UserError, match="pi0 has no memory, but policy.memory_size=3"):
        to_transformers(make_model(memory_size=3))


# ---- tokenizers


def test_bytes_are_tokens():
    tokenizer = ByteTokenizer(begin=256, vocabulary=258)
    spec = EnvSpec({"task": ((), "int64")}, 2, instructions=INSTRUCTIONS)
    tokens, text = Instructions(spec, tokenizer)(TensorDict({"observation": {"task": torch.arange(3)}}, [3]))
    assert tokens.shape == text.shape == (3, 14) and text.sum(1).tolist() == [14, 8, 1]
    assert tokens[1, :8].tolist() == [256, *b"push it"] and tokens[1, 8:].eq(0).all()


def test_a_tokenizer_of_a_checkpoint_is_read(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<bos>": 0, "push": 1, "it": 2, "\n": 3, "<unk>": 4}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "removed")
    library.normalizer = tokenizers.normalizers.Replace("\n", " \n")
    library.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = _FileTokenizer(str(path), "policy.tokenizer")
        assert tokenizer("push it") == [0, 1, 2, 3] and tokenizer.vocabulary == 5
    policy = NativeVLA(NativeVLAConfig(tokenizer=str(tmp_path)), Instructed(1).spec, 4)
    assert policy.encoder.instructions.ids[1, :4].tolist() == [0, 1, 2, 3]
    # it is saved with the weights
    save_model(make_model(), tmp_path / "saved", tokenizer=tmp_path)
    policy = NativeVLA(NativeVLAConfig(model_path=str(tmp_path / "saved")), Instructed(1).spec, 4)
    assert policy.encoder.instructions.ids[1, :4].tolist() == [0, 1, 2, 3]
