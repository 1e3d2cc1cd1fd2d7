"""A pi0 checkpoint from a folder: strictly, without a download, without running what is in it."""

import json
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from sparring.errors import UserError
from sparring.out_of_memory import shortage


def transformers():
    """The library, which only policies from Hugging Face need."""
    try:
        import transformers
    except ImportError:
        raise UserError(
            "policy.name=pi0 needs transformers, which is not installed: pip install 'sparring[vla]'"
        ) from None
    return transformers


def load_pi0(path: str | None, attention: str) -> nn.Module:
    """transformers' own PI0ForConditionalGeneration, in float32, with every weight of the folder and no other."""
    folder, library = checkpoint_folder(path), transformers()
    # its bars would run into the progress of the run
    library.utils.logging.disable_progress_bar()
    try:
        model, info = library.PI0ForConditionalGeneration.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            dtype="float32",
            attn_implementation=attention,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    # whatever is wrong with files of somebody else's making: a sentence
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        if shortage(error):
            raise
        raise UserError(f"policy.model_path={path} cannot be loaded as pi0: {_first_line(error)}") from error
    reshaped = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"])
    wrong = {"missing": info["missing_keys"], "unexpected": info["unexpected_keys"], "of another shape": reshaped}
    told = "; ".join(f"{len(keys)} {what}: {_some(sorted(keys))}" for what, keys in wrong.items() if keys)
    if told:
        raise UserError(f"policy.model_path={path}: its weights do not fit its config.json: {told}")
    return model.eval()


def checkpoint_folder(path: str | None) -> Path:
    """A folder on this machine whose config.json says pi0."""
    if path is None:
        raise UserError(
            "policy.model_path is needed: a folder with a pi0 checkpoint, as transformers' save_pretrained writes it"
        )
    folder = Path(path)
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(
            f"policy.model_path={path}: there is no config.json in such a folder; download the checkpoint first "
            "(nothing is downloaded here), and give its folder"
        )
    kind = read_json(file).get("model_type")
    if kind != "pi0":
        raise UserError(f"policy.model_path={path}: config.json says model_type={kind!r}, expected 'pi0'")
    return folder


def read_json(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"'{file}' cannot be read: {error}") from None


def _some(keys: list[str], most: int = 4) -> str:
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
