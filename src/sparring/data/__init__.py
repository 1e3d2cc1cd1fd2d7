"""Storage: where experience is kept. The names below are loaded when first used."""

import importlib

BUFFERS = {
    "standard": "sparring.data.buffer:RolloutBuffer",
    "vla": "sparring.data.ring:VLABuffer",
}

_WHERE = {
    "BatchBuilder": "batches",
    "Demonstrations": "demonstrations",
    "EpisodeRecorder": "recorder",
    "EpisodeStore": "episodes",
    "MixedWindows": "windows",
    "PrioritizedWindows": "windows",
    "RolloutBuffer": "buffer",
    "SequentialWindows": "windows",
    "ShuffledWindows": "windows",
    "VLABuffer": "ring",
}
__all__ = list(_WHERE)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'sparring.data' has no attribute '{name}'; it offers {', '.join(_WHERE)}")
    return getattr(importlib.import_module(f"sparring.data.{_WHERE[name]}"), name)
