#!/usr/bin/env bash
# Sets up the same virtual environment as quickstart.sh and runs the linter, the type checker and all tests.
#
#   ./test.sh                       everything, in two processes (TEST_PROCESSES=N for more)
#   ./test.sh --fast                without the tests marked slow
#   ./test.sh tests/algorithms -x   other arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")"
fast=()
if [ "${1:-}" = --fast ]; then
  fast=(-m "not slow")
  shift
fi
. ./setup_env.sh
set_up "[dev,demos,vla,sims,tensorboard,wandb,browser,docs]"

# its own requirements pin an older mujoco; without it the tests of its adapter are skipped
metaworld=metaworld==3.1.1
if ! python -m pip show --quiet metaworld 2> /dev/null; then
  say "installing $metaworld for the tests of its adapter"
  python -m pip install --quiet --disable-pip-version-check --no-deps "$metaworld" || say "could not; these tests will be skipped"
fi

# the report is looked at in a real browser where there is one, or where one can be had; else those tests are skipped
if ! command -v chromium chromium-browser google-chrome > /dev/null && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  say "installing Chromium for the tests of the report"
  { timeout 120 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 240 apt-get install -y -qq --no-install-recommends chromium; } > /dev/null 2>&1 \
    || say "could not; these tests will be skipped"
fi

say "ruff"
ruff check .
ruff format --check .

say "mypy"
mypy

say "documentation"
# a broken link or reference is an error
python -m sphinx -W --keep-going -q -b html docs build/site

say "pytest"
# with its assertions rewritten, each module of tests is compiled once and not in each process
unset PYTHONDONTWRITEBYTECODE
# the odd spelling: bash 3.2, which macOS has, takes an empty array for an unset one
python -m pytest -n "${TEST_PROCESSES:-2}" --dist loadscope ${fast[@]+"${fast[@]}"} "$@"
