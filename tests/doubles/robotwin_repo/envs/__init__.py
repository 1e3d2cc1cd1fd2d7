"""A double of RoboTwin's repository: the names and parameters that the adapter uses, without SAPIEN and CuRobo."""

import os

from ._GLOBAL_CONFIGS import *  # noqa: F403

GPU = os.environ.get("CUDA_VISIBLE_DEVICES")  # when it is imported, as SAPIEN and CUDA read it
