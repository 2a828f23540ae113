#!/bin/sh
# A job on YARN, in cluster mode: conf/submit/yarn.sh jobs/train.py --config job.yaml
# environment.tar.gz has sparkdl[jobs] and torch, see docs/guide/packaging.md. job.yaml goes to the driver with --files.
# The driver's container goes away with the job: let `runs` in job.yaml be a folder that all nodes mount.
# With GPUS=1 each task gets one; YARN must have GPUs as a resource.
set -eu
exec spark-submit \
  --master yarn --deploy-mode cluster \
  --properties-file "$(dirname "$0")/../spark-defaults.conf" \
  --archives environment.tar.gz#environment \
  --conf spark.pyspark.python=./environment/bin/python \
  --conf spark.yarn.appMasterEnv.PYSPARK_PYTHON=./environment/bin/python \
  --files job.yaml,"$(dirname "$0")/../discover_gpus.sh" \
  --num-executors 4 --executor-memory 8g --executor-cores 4 --conf spark.executor.memoryOverhead=4g \
  --conf spark.dynamicAllocation.enabled=false \
  ${GPUS:+--conf spark.executor.resource.gpu.amount=4 --conf spark.task.resource.gpu.amount=1} \
  ${GPUS:+--conf spark.executor.resource.gpu.discoveryScript=./discover_gpus.sh} \
  "$@"
