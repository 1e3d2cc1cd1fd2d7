"""Storage of experience: buffers, episode stores and datasets. The names below are imported on first use."""

from sparring import lazy_names

_MODULE_OF = {"BatchBuilder": "batches", "Demonstrations": "demonstrations"}
_MODULE_OF |= {"EpisodeRecorder": "episodes", "EpisodeStore": "episodes", "MixedWindows": "windows"}
_MODULE_OF |= {"RolloutBuffer": "buffer", "SequentialWindows": "windows", "ShuffledWindows": "windows"}
_MODULE_OF |= {"VLABuffer": "buffer"}
__all__ = list(_MODULE_OF)
__getattr__, __dir__ = lazy_names("sparring.data", _MODULE_OF)
