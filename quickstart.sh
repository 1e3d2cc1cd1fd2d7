#!/usr/bin/env bash
# From a fresh clone to a robot that lifts a cube, a world model that predicts the next camera frames, and a report of both,
# on a laptop CPU, in minutes. Safe to run again: it resumes where it stopped. Extra arguments go to
# `sparring train finetune`.
set -euo pipefail
cd "$(dirname "$0")"
. ./setup_env.sh
set_up ""

say "1 of 3: the built-in arm learns to lift a cube (about a minute; Ctrl-C saves; run this script again to resume)"
sparring train finetune --config configs/lift_d0.yaml training.total_timesteps=150000 --output outputs/quickstart/lift_d0 "$@"

say "2 of 3: a world model learns to predict the next frames of two cameras (about two minutes; Ctrl-C as above)"
sparring train teacher --config configs/quickstart.yaml --output outputs/quickstart/world_model

say "3 of 3: a report of both: success compared with random actions, videos, predicted (left) and true (right) frames"
page=outputs/quickstart/report.html
sparring report outputs/quickstart/lift_d0 outputs/quickstart/world_model --output "$page"
# an interactive terminal with a browser
if [ -t 1 ] && [ "$(uname -s)" = Darwin ]; then
  open "$page" || true
elif [ -t 1 ] && [ -n "${DISPLAY:-}${WAYLAND_DISPLAY:-}" ] && command -v xdg-open > /dev/null; then
  xdg-open "$page" || true
fi

say "done: open $page"
echo "next, with . ${VENV:-.venv}/bin/activate:
  sparring eval outputs/quickstart/lift_d0 --videos 4    # held-out episodes, four of them as videos
  sparring train all --config configs/quickstart.yaml --output outputs/quickstart_all    # also an explorer: docs/phases.md
  sparring --help"
