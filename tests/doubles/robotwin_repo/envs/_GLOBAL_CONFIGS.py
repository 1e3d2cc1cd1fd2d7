import os

ROOT_PATH = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/"
CONFIGS_PATH = os.path.join(ROOT_PATH, "env_cfg/task_config/")
