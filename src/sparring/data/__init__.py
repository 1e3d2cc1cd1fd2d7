"""Storage: where experience is kept. The names below are loaded when first used."""

from sparring import lazy_names

_MODULE_OF = {
    "BatchBuilder": "sparring.data.batches",
    "Demonstrations": "sparring.data.demonstrations",
    "EpisodeRecorder": "sparring.data.episodes",
    "EpisodeStore": "sparring.data.episodes",
    "MixedWindows": "sparring.data.windows",
    "RolloutBuffer": "sparring.data.buffer",
    "SequentialWindows": "sparring.data.windows",
    "ShuffledWindows": "sparring.data.windows",
    "VLABuffer": "sparring.data.buffer",
}
__all__ = list(_MODULE_OF)
__getattr__, __dir__ = lazy_names("sparring.data", _MODULE_OF)
