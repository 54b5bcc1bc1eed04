#!/usr/bin/env bash
# Train Sokoban with periodic gradient analysis: `--help`, docs/experiments.md.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")")/../env.sh"
exec "$PYTHON" -m ragen sweep grad_analysis "$@"
