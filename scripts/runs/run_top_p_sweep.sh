#!/usr/bin/env bash
# Sweep the strength of the reward-variance filter: `--help`, docs/experiments.md.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")")/../env.sh"
exec "$PYTHON" -m ragen sweep top_p_sweep "$@"
