#!/bin/sh
# The GPUs of a node, for Spark to assign: spark.executor.resource.gpu.discoveryScript (YARN, Kubernetes) or
# spark.worker.resource.gpu.discoveryScript (standalone). By name; of one that is divided (MIG) its parts. Where
# CUDA_VISIBLE_DEVICES is set, those that it leaves.
set -eu
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
  found=$(printf '%s' "$CUDA_VISIBLE_DEVICES" | tr -d ' ' | tr ',' '\n')
else
  listed=$(nvidia-smi -L)
  found=$(printf '%s\n' "$listed" | sed -n 's/^\( *\)\(GPU\|MIG\) .*(UUID: \([^)]*\)).*/\2 \3/p' | awk '
    $1 == "GPU" { if (whole != "") print whole; whole = $2 }
    $1 == "MIG" { whole = ""; print $2 }
    END { if (whole != "") print whole }')
fi
printf '{"name": "gpu", "addresses": [%s]}\n' "$(printf '%s\n' "$found" | sed '/^$/d; s/.*/"&"/' | paste -s -d , -)"
