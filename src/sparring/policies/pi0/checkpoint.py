"""Reading transformers' pi0 checkpoints."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from sparring.errors import UserError
from sparring.processes.memory_errors import shortage

# ---- Images as a checkpoint's image processor would prepare them, in torch alone.


# PIL's numbers of the ways to resize
_MODES = {2: "bilinear", 3: "bicubic"}


class ImagePreparation(nn.Module):
    """uint8 [B, 3, H, W] -> float32 [B, 3, size, size]: resized, scaled to about +-1, padded at the right and below.

    A processor that is told height and width stretches; one that is told the most of both keeps the proportions.
    """

    def __init__(self, folder: Path, size: int):
        super().__init__()
        settings = _settings(folder)
        self.size = size
        shape = settings.get("size") or {}
        if not isinstance(shape, dict):
            raise UserError(f"'{folder}': its image processor has size={shape}; expected height and width")
        self.keeps_proportions = "height" not in shape
        asked = (
            shape.get("height") or shape.get("max_height", size),
            shape.get("width") or shape.get("max_width", size),
        )
        if asked != (size, size):
            raise UserError(
                f"'{folder}': its image processor makes images of {asked[0]}x{asked[1]}, its vision model reads "
                f"{size}x{size}"
            )
        resample = settings.get("resample", 3)
        if resample not in tuple(_MODES):
            raise UserError(f"'{folder}': its image processor has resample={resample}; expected 2 or 3")
        self.mode = _MODES[resample]
        (factor,) = _numbers(folder, "rescale_factor", [settings.get("rescale_factor", 1 / 255)], 1)
        mean, std = (
            torch.tensor(_numbers(folder, name, settings.get(name, [0.5] * 3), 3)).view(3, 1, 1)
            for name in ("image_mean", "image_std")
        )
        self.register_buffer("scale", factor / std, persistent=False)
        self.register_buffer("shift", mean / std, persistent=False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        height, width = image.shape[-2:]
        wanted = self._wanted(height, width)
        image = image.float()
        # one direction after the other, with whole numbers in between, as PIL and torchvision do
        image = self._resized(self._resized(image, (height, wanted[1])), wanted)
        image = image * self.scale - self.shift
        return nn.functional.pad(image, (0, self.size - wanted[1], 0, self.size - wanted[0]))

    def _resized(self, image: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        if size == image.shape[-2:]:
            return image
        image = nn.functional.interpolate(image, size, mode=self.mode, antialias=True, align_corners=False)
        return image.add_(0.5).floor_().clamp_(0, 255)

    def _wanted(self, height: int, width: int) -> tuple[int, int]:
        if not self.keeps_proportions:
            return self.size, self.size
        shrink = min(self.size / height, self.size / width)
        return int(height * shrink), int(width * shrink)


def _settings(folder: Path) -> dict:
    """What the checkpoint says of its image processor; nothing where it says nothing: pi0's own."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            settings = read_json(folder / name)
            inner = settings.get("image_processor", settings)
            if not isinstance(inner, dict):
                raise UserError(f"'{folder / name}': image_processor is {inner!r}, expected names with values")
            return inner
    return {}


def _numbers(folder: Path, name: str, given, count: int) -> list[float]:
    if not (isinstance(given, list) and len(given) == count and all(isinstance(x, int | float) for x in given)):
        raise UserError(f"'{folder}': its image processor has {name}={given}; expected numbers, {count} of them")
    return [float(x) for x in given]


# ---- A pi0 checkpoint from a folder: strictly, without a download, without running what is in it.


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
