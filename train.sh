#!/usr/bin/env bash
# Train an agent: `bash train.sh sokoban`, `bash train.sh --config-name _2_sokoban`. Same as `./ragen train`.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")")/scripts/env.sh"
exec "$PYTHON" -m ragen train "$@"
