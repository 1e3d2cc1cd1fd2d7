"""Storage: where experience is kept. The names below are loaded when first used."""

import importlib

_MODULE_OF = {
    "BatchBuilder": "batches",
    "Demonstrations": "demonstrations",
    "EpisodeRecorder": "recorder",
    "EpisodeStore": "episodes",
    "MixedWindows": "windows",
    "RolloutBuffer": "buffer",
    "SequentialWindows": "windows",
    "ShuffledWindows": "windows",
    "VLABuffer": "buffer",
}
__all__ = list(_MODULE_OF)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'sparring.data' has no attribute '{name}'; it offers {', '.join(_MODULE_OF)}")
    return getattr(importlib.import_module(f"sparring.data.{_MODULE_OF[name]}"), name)
