#!/usr/bin/env bash
# All checks:           bash test.sh
# Only the slow tests:  bash test.sh --slow
# Only pytest:          bash test.sh tests/env -k sokoban
set -euo pipefail
RAGEN_SCOPE=dev
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")")/scripts/env.sh"

parallel=(-n "$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)" --dist worksteal)
if [ "${1:-}" = --slow ]; then
    shift
    # Triton's interpreter, for the tests of GPU kernels. An environment that is not ours is left as it is.
    if [ "$PYTHON" = "$(pwd -P)/.venv/bin/python" ] && [ "$(uname -sm)" = "Linux x86_64" ]; then
        "$PYTHON" -I scripts/bootstrap.py add triton --optional >&2 ||
            echo "Triton could not be installed: the tests of GPU kernels are skipped." >&2
    fi
    exec "$PYTHON" -m pytest "${parallel[@]}" -m slow "$@"
elif [ "$#" -gt 0 ]; then
    exec "$PYTHON" -m pytest "$@"
fi

status=0
"$PYTHON" -m ruff check . || status=$?
"$PYTHON" -m ruff format --check . || status=$?
if grep -q '^\[tool.importlinter\]' pyproject.toml; then
    "$PYTHON" -c 'import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())' ||
        status=$?
fi
if grep -q '^\[tool.mypy\]' pyproject.toml; then
    "$PYTHON" -m mypy || status=$?
fi
"$PYTHON" -m pytest "${parallel[@]}" || status=$?
exit "$status"
