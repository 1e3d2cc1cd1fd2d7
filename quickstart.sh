#!/usr/bin/env bash
# From a fresh clone to a trained robot policy and a video of it, and to a world model and an explorer that have sparred,
# on a laptop CPU, in minutes. Safe to run again: it goes on where it stopped. Extra arguments go to
# `sparring train finetune`.
set -euo pipefail
cd "$(dirname "$0")"
. ./setup_env.sh
set_up ""

say "training: the built-in arm learns reach_d0 (about a minute; Ctrl-C saves, running this again goes on)"
sparring train finetune --output outputs/quickstart "$@"

say "training: a world model, an explorer, and both against each other (about 6 minutes; Ctrl-C as above)"
sparring train all --config configs/quickstart.yaml --output outputs/quickstart_all

say "done. Look at outputs/quickstart (videos/*.mp4, samples/*.png, episode_metrics.jsonl) and at
    outputs/quickstart_all/{teacher,adversarial}_rl (samples/*_pred_vs_gt.png: predicted left, true right).
    Minutes are enough to see the phases at work, not for an explorer that finds more than noise does: docs/phases.md"
echo "next:  . ${VENV:-.venv}/bin/activate && sparring --help"
