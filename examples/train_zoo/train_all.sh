#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Train the objectives side by side on one GPU: train_all.sh OUT SECONDS [objective ...]
# Further options of train.py come from ZOO_OPTIONS. One archive per objective, with its log.
out=$1
seconds=$2
shift 2
test $# -gt 0 || set -- d2f fast_dllm_v2 edit dmax diffusion_gemma
here=$(dirname "$0")
mkdir -p /tmp/zoo
workers=$(($(nproc) / $#))
processes=
for objective in "$@"; do
  (
    PYTHONPATH="$here/../../python" OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=$workers \
      PYTHONUNBUFFERED=1 python3 "$here/train.py" --objective "$objective" \
      --out "/tmp/zoo/$objective" --compile --eval 1000 --max-seconds "$seconds" \
      --workers "$workers" $ZOO_OPTIONS >"/tmp/zoo/$objective.log" 2>&1
    tar -C /tmp/zoo -cf "$out/$objective.tar" "$objective" "$objective.log"
  ) &
  processes="$processes $!"
done
# shellcheck disable=SC2086
wait $processes
for objective in "$@"; do
  grep -E "step .*000/|parameters|saved|exact|Error|error" "/tmp/zoo/$objective.log"
done
