# Sourced by every entry script: finds or creates the environment, sets PYTHON, and changes to the repository root.
#
#     source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")")/scripts/env.sh"
#
# Set RAGEN_SCOPE=dev before it for the test tools. Works under `set -euo pipefail` and with bash 3.2 (macOS).
# All messages go to stderr: the output of train.sh is often redirected into a log.

ragen_here="$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")"
ragen_root="$(CDPATH='' cd -- "$(dirname -- "$ragen_here")/.." && pwd -P)" || exit 2

case "$(uname -s 2>/dev/null)" in
MINGW* | MSYS* | CYGWIN*)
    echo "ragen does not run on Windows itself. Use WSL, a Linux inside Windows: run \`wsl --install\` in PowerShell," \
        "then clone and start ragen there." >&2
    exit 2
    ;;
esac

# Any Python from 3.11 on can run bootstrap.py. Each is tried, since a pyenv shim may exist and fail. The one of .venv
# comes first because it starts faster than a shim; RAGEN_PYTHON comes last because bootstrap.py returns it untested.
ragen_starter=""
ragen_found=""
for ragen_candidate in "$ragen_root/.venv/bin/python" python3 python \
    python3.14 python3.13 python3.12 python3.11 "${RAGEN_PYTHON:-}"; do
    if [ -z "$ragen_candidate" ] || ! command -v "$ragen_candidate" >/dev/null 2>&1; then
        continue
    fi
    ragen_version="$("$ragen_candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" ||
        ragen_version="broken"
    case "$ragen_version" in
    3.1[1-9] | 3.[2-9][0-9])
        ragen_starter="$ragen_candidate"
        break
        ;;
    esac
    ragen_found="${ragen_found:+$ragen_found, }$ragen_candidate ($ragen_version)"
done
if [ -z "$ragen_starter" ]; then
    echo "ragen needs Python 3.11 or newer; found: ${ragen_found:-none}." \
        "Install one (Debian: apt install python3 python3-venv; macOS: brew install python)" \
        "or set RAGEN_PYTHON to its path." >&2
    exit 2
fi

PYTHON="$("$ragen_starter" -I "$ragen_root/scripts/bootstrap.py" "${RAGEN_SCOPE:-base}")" || exit $?

# Use this checkout's code, whichever environment runs it: another clone may be installed there.
case "${PYTHONPATH:-}:" in
"$ragen_root/src:"*) ;;
*) PYTHONPATH="$ragen_root/src${PYTHONPATH:+:$PYTHONPATH}" ;;
esac
export PYTHONPATH

# How messages name the command: as the user can type it, from where they are (src/ragen/command_hint.py).
RAGEN_COMMAND="$ragen_root/ragen"
if [ "$(pwd -P)" = "$ragen_root" ]; then
    RAGEN_COMMAND="./ragen"
fi
export RAGEN_COMMAND

# Relative paths on the command line start here.
export RAGEN_CALLER_DIR="$PWD"
cd -- "$ragen_root" || exit 2
unset ragen_here ragen_root ragen_starter ragen_found ragen_candidate ragen_version
