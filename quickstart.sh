#!/usr/bin/env bash
# From a fresh clone to a robot that lifts a cube, a world model that foretells what its cameras see, and a page that shows
# both, on a laptop CPU, in minutes. Safe to run again: it goes on where it stopped. Extra arguments go to
# `sparring train finetune`.
set -euo pipefail
cd "$(dirname "$0")"
. ./setup_env.sh
set_up ""

say "1 of 3: the built-in arm learns to lift a cube (about a minute; Ctrl-C saves, running this again goes on)"
sparring train finetune --config configs/lift_d0.yaml training.total_timesteps=150000 --output outputs/quickstart/lift_d0 "$@"

say "2 of 3: a world model learns what its two cameras will see next (about two minutes; Ctrl-C as above)"
sparring train teacher --config configs/quickstart.yaml --output outputs/quickstart/world_model

say "3 of 3: a page of both: success beside random actions, videos, and pictures foretold (left) beside true ones (right)"
page=outputs/quickstart/report.html
sparring report outputs/quickstart/lift_d0 outputs/quickstart/world_model --output "$page"
# somebody is there, with a browser
if [ -t 1 ] && [ "$(uname -s)" = Darwin ]; then
  open "$page" || true
elif [ -t 1 ] && [ -n "${DISPLAY:-}${WAYLAND_DISPLAY:-}" ] && command -v xdg-open > /dev/null; then
  xdg-open "$page" || true
fi

say "done: look at $page"
echo "next, with . ${VENV:-.venv}/bin/activate:
  sparring eval outputs/quickstart/lift_d0 --videos 4    # held-out episodes, and films of some
  sparring train all --config configs/quickstart.yaml --output outputs/quickstart_all    # and an explorer: docs/phases.md
  sparring --help"
