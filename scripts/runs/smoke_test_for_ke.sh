#!/usr/bin/env bash
# The KL/entropy smoke-test grid: `--help`, docs/experiments.md. Options of the script override these variables.
set -euo pipefail

MODEL_SIZE=3B # the model in the name of the summary log
MODEL_PATH=Qwen/Qwen2.5-3B-Instruct
CONFIG=_2_sokoban
GPUS=(0 1 2 3 4 5 6 7)
MAX_PARALLEL=8
SKIP_STATUSES=("success") # () runs everything again

list() { (
    IFS=,
    echo "$*"
); }

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")")/../env.sh"
exec "$PYTHON" -m ragen sweep "${SMOKE_PLAN:-smoke_test_for_ke}" --model "$MODEL_PATH" --model-size "$MODEL_SIZE" \
    --config "$CONFIG" --gpus "$(list "${GPUS[@]}")" --max-parallel "$MAX_PARALLEL" \
    --skip-statuses "$(list "${SKIP_STATUSES[@]-none}")" "$@"
