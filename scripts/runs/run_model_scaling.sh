#!/usr/bin/env bash
# Train Sokoban with models of growing size, then evaluate them at 5 and 25 turns, before and after training: one table and
# one plot, log/terminal/sokoban_model_scaling_eval.html. `--help`, docs/experiments.md.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")")/../env.sh"
exec "$PYTHON" -m ragen sweep model_scaling "$@"
