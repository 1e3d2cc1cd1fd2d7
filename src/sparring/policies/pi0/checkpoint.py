"""A pi0 checkpoint from a folder: strictly, without a download, without running what is in it."""

import json
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from sparring.errors import UserError
from sparring.out_of_memory import shortage

# what it may come to where a config or its weights are not what they should be
_OF_FILES = (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError)
_OF_FILES += (SafetensorError,)


def transformers():
    """The library, which only policies from Hugging Face need."""
    try:
        import transformers
        from transformers import PI0ForConditionalGeneration  # noqa: F401 (older ones have none)
    except ImportError:
        raise UserError("pi0 needs transformers >= 5.17, which is not here: pip install 'sparring[vla]'") from None
    return transformers


def load_pi0(
    path: str | Path | None, attention: str = "eager", dtype: str = "float32", key: str = "policy.model_path"
) -> nn.Module:
    """transformers' own PI0ForConditionalGeneration with every weight of the folder and no other.

    `dtype`: auto is that of the files. `key`: what the path was given as.
    """
    folder, library = checkpoint_folder(path, key), transformers()
    from huggingface_hub.errors import StrictDataclassError

    # its bars would run into the progress of the run
    library.utils.logging.disable_progress_bar()
    try:
        model, info = library.PI0ForConditionalGeneration.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            dtype=dtype,
            attn_implementation=attention,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    # whatever is wrong with files of somebody else's making: a sentence
    except (*_OF_FILES, StrictDataclassError) as error:
        if shortage(error):
            raise
        raise UserError(f"{key}={path} cannot be loaded as pi0: {_first_line(error)}") from error
    reshaped = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"])
    # words of the action expert, which nothing reads
    missing = [name for name in info["missing_keys"] if not name.startswith("model.dit.embed_tokens")]
    wrong = {"missing": missing, "unexpected": info["unexpected_keys"], "of another shape": reshaped}
    told = "; ".join(f"{len(keys)} {what}: {_some(sorted(keys))}" for what, keys in wrong.items() if keys)
    if told:
        raise UserError(f"{key}={path}: its weights do not fit its config.json: {told}")
    return model.eval()


def checkpoint_folder(path: str | Path | None, key: str = "policy.model_path") -> Path:
    """A folder on this machine whose config.json says pi0."""
    if path is None:
        raise UserError(f"{key} is needed: a folder with a pi0 checkpoint, as transformers' save_pretrained writes it")
    folder = Path(path).expanduser()
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(
            f"{key}={path}: there is no config.json in such a folder; download the checkpoint first "
            "(nothing is downloaded here), and give its folder"
        )
    kind = read_json(file).get("model_type")
    if kind != "pi0":
        raise UserError(f"{key}={path}: config.json says model_type={kind!r}, expected 'pi0'")
    return folder


def read_json(file: Path) -> dict:
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"'{file}' cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"'{file}' holds a {type(values).__name__}, expected names with values; fetch it again")
    return values


def _some(keys: list[str], most: int = 4) -> str:
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
