#!/usr/bin/env bash
# Sweep how often FrozenLake's ice slips: `--help`, docs/experiments.md.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")")/../env.sh"
exec "$PYTHON" -m ragen sweep frozen_lake_slipper_rate_sweep "$@"
