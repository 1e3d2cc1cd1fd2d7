"""A pi0 checkpoint with a few thousand weights, in the format of transformers; nothing is downloaded."""

import json
from pathlib import Path

import torch

# tokens of an image of 16 pixels in patches of 8
IMAGE_TOKENS, CHUNK, STEPS, ACTIONS, STATES = 4, 4, 3, 4, 8
VOCABULARY = 300


def make_model(states: int = STATES, actions: int = ACTIONS):
    from transformers import PI0Config, PI0ForConditionalGeneration

    gemma = {
        "model_type": "gemma",
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        # transformers 5.17 does not copy it from the language model
        "vocab_size": VOCABULARY,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
        "vision_use_head": False,
    }
    vlm = {
        "model_type": "paligemma",
        "text_config": gemma | {"hidden_size": 24, "intermediate_size": 32},
        "vision_config": vision,
        "projection_dim": 24,
        "image_token_id": VOCABULARY - 1,
    }
    config = PI0Config(
        vlm_config=vlm,
        dit_config=gemma | {"hidden_size": 16, "intermediate_size": 32},
        chunk_size=CHUNK,
        max_state_dim=states,
        max_action_dim=actions,
        num_inference_steps=STEPS,
    )
    torch.manual_seed(0)
    model = PI0ForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            # the initial weights of transformers are so small that errors have no effect
            parameter.add_(torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.ndim > 1 else 0.05))
    return model


def write(folder: Path, states: int = STATES, actions: int = ACTIONS, **how) -> Path:
    make_model(states, actions).save_pretrained(folder, **how)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Four special tokens, then one token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    names = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def edit_json(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
