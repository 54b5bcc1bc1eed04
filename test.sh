#!/usr/bin/env bash
# All checks: `bash test.sh`. With arguments only pytest, with these: `bash test.sh tests/env -k sokoban`.
set -euo pipefail
RAGEN_SCOPE=dev
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")")/scripts/env.sh"
if [ "$#" -gt 0 ]; then
    exec "$PYTHON" -m pytest "$@"
fi
status=0
"$PYTHON" -m ruff check . || status=$?
"$PYTHON" -m pytest || status=$?
exit "$status"
