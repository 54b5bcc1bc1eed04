#!/usr/bin/env bash
# Sokoban with models of growing size: `--help`, docs/experiments.md.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")")/../env.sh"
exec "$PYTHON" -m ragen sweep model_scaling "$@"
