import os

import yaml

libero_config_path = os.environ.get("LIBERO_CONFIG_PATH", os.path.expanduser("~/.libero"))
config_file = os.path.join(libero_config_path, "config.yaml")


def get_libero_path(query_key):
    with open(config_file) as file:
        return yaml.safe_load(file)[query_key]


def get_assets_path():
    print("looking for assets")
    return os.environ.get("DOUBLE_ASSETS", "/nowhere")


if not os.path.exists(config_file):
    input("Do you want to specify a custom path for the dataset folder? (Y/N): ")
