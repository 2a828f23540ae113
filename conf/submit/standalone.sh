#!/bin/sh
# A job on a standalone cluster: MASTER=spark://host:7077 conf/submit/standalone.sh jobs/train.py --config job.yaml
# environment.tar.gz has sparkdl[jobs] and torch, see docs/guide/packaging.md; the driver, on this machine, runs
# PYSPARK_DRIVER_PYTHON, else .venv/bin/python. With GPUS=1 each task gets one; the workers then need
# spark.worker.resource.gpu.amount and .discoveryScript (conf/discover_gpus.sh) in their properties.
set -eu
export PYSPARK_PYTHON=./environment/bin/python PYSPARK_DRIVER_PYTHON="${PYSPARK_DRIVER_PYTHON:-.venv/bin/python}"
exec spark-submit \
  --master "$MASTER" \
  --properties-file "$(dirname "$0")/../spark-defaults.conf" \
  --archives environment.tar.gz#environment \
  --executor-memory 8g --executor-cores 4 --total-executor-cores 16 \
  ${GPUS:+--conf spark.executor.resource.gpu.amount=4 --conf spark.task.resource.gpu.amount=1} \
  "$@"
