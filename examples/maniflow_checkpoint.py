"""Converts a checkpoint of ManiFlow (.ckpt) to weights that `sparring` can read, and its config to plain YAML.

    python maniflow_checkpoint.py latest.ckpt maniflow.safetensors

Such a checkpoint is a pickle with objects of OmegaConf: loading it EXECUTES code that the file names. Run this program
only for files whose author you trust, in ManiFlow's own environment (it needs torch, dill, omegaconf and safetensors,
not sparring). It writes the averaged weights if there are any. Afterwards:

    sparring config import maniflow.yaml imitate --output configs/mine.yaml
    sparring train imitate --config configs/mine.yaml pretrained=maniflow.safetensors imitate.demos=DEMOS
"""

import sys
from pathlib import Path

import dill
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file


def main() -> None:
    if len(sys.argv) != 3 or Path(sys.argv[2]).suffix != ".safetensors":
        raise SystemExit("expected: python maniflow_checkpoint.py FILE.ckpt FILE.safetensors")
    source, target = map(Path, sys.argv[1:])
    payload = torch.load(source, map_location="cpu", pickle_module=dill, weights_only=False)
    states = payload["state_dicts"]
    name = "ema_model" if "ema_model" in states else "model"
    weights = {key: tensor.clone().contiguous() for key, tensor in states[name].items()}
    save_file(weights, target)
    print(f"{target}: {len(weights)} tensors of {name}")
    if "cfg" in payload:
        config = target.with_suffix(".yaml")
        # references such as ${now:...} have no value here, so they are kept
        config.write_text(OmegaConf.to_yaml(payload["cfg"], resolve=False))
        print(f"{config}: its config")


if __name__ == "__main__":
    main()
