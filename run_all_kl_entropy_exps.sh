#!/usr/bin/env bash
# The smoke-test grid with every KL estimator, with the variables of the script it runs: `--help`.
set -euo pipefail
here="$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")")"
SMOKE_PLAN=all_kl_entropy exec bash "$here/scripts/runs/smoke_test_for_ke.sh" "$@"
