#!/usr/bin/env bash
# Sokoban with models of growing size: `--help`, docs/experiments.md. Then, at 5 and at 25 turns, one table and one plot:
# `./ragen eval log/terminal/sokoban_model_scaling.log --max-turns 5,25`, docs/evaluation.md.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")")/../env.sh"
exec "$PYTHON" -m ragen sweep model_scaling "$@"
