#!/usr/bin/env bash
# The main table, by algorithm: `--help`, docs/experiments.md.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")")/../env.sh"
exec "$PYTHON" -m ragen sweep main_table_diff_algo "$@"
