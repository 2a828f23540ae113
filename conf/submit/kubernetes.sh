#!/bin/sh
# A job on Kubernetes: MASTER=k8s://https://host:443 IMAGE=... conf/submit/kubernetes.sh --config /opt/job.yaml
# The image has sparkdl[jobs] and torch, and in /opt job.yaml, jobs/train.py and discover_gpus.sh, see docs/guide/packaging.md.
# A pod has 64 MB of /dev/shm; the volume below is in memory too. With GPUS=1 each task gets one.
# The driver's pod goes away with the job: mount a volume into it, and let `runs` in job.yaml be a folder there.
set -eu
volume=spark.kubernetes.executor.volumes.emptyDir.shm
exec spark-submit \
  --master "$MASTER" --deploy-mode cluster \
  --properties-file "$(dirname "$0")/../spark-defaults.conf" \
  --conf spark.kubernetes.container.image="$IMAGE" \
  --conf spark.executor.instances=4 --conf spark.executor.memory=8g --conf spark.executor.cores=4 \
  --conf spark.executor.memoryOverhead=4g \
  --conf $volume.mount.path=/dev/shm --conf $volume.options.medium=Memory --conf $volume.options.sizeLimit=4Gi \
  ${GPUS:+--conf spark.executor.resource.gpu.amount=4 --conf spark.task.resource.gpu.amount=1} \
  ${GPUS:+--conf spark.executor.resource.gpu.vendor=nvidia.com} \
  ${GPUS:+--conf spark.executor.resource.gpu.discoveryScript=/opt/discover_gpus.sh} \
  local:///opt/jobs/train.py "$@"
