#!/usr/bin/env bash
# Sets up the same virtual environment as quickstart.sh and runs the linter and all tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")"
. ./setup_env.sh
set_up "[dev,demos,vla,tensorboard,wandb]"

say "ruff"
ruff check .
ruff format --check .

say "pytest"
python -m pytest "$@"
