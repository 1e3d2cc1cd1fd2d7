#!/usr/bin/env bash
# From a fresh clone to a trained robot policy and a video of it, on a laptop CPU, in minutes.
# Safe to run again: it goes on where it stopped. Extra arguments go to `sparring train finetune`.
set -euo pipefail
cd "$(dirname "$0")"
. ./setup_env.sh
set_up ""

say "training: the built-in arm learns reach_d0 (about a minute; Ctrl-C saves, running this again goes on)"
sparring train finetune --output outputs/quickstart "$@"

say "done. Look at outputs/quickstart: videos/*.mp4, samples/*.png, episode_metrics.jsonl"
echo "next:  . ${VENV:-.venv}/bin/activate && sparring --help"
