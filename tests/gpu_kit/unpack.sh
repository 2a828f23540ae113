# Sourced on the GPU machine, in the project's root, when all .gpu/kit-* are in /tmp/kit:
#   . .gpu/unpack.sh && $PY -m pytest -m gpu tests
[ -d /tmp/kit/kit ] || cat /tmp/kit/kit-* | tar -xJ -C /tmp/kit || { echo "parts missing: $(ls /tmp/kit)"; exit 1; }
export JAVA_HOME=/tmp/kit/kit/jre PATH="/tmp/kit/kit/jre/bin:$PATH"
export PY=${PY:-$(command -v python3)}
export PYTHONPATH="$PWD:$PWD/benchmarks:/tmp/kit/kit/site${PYTHONPATH:+:$PYTHONPATH}"
export SPARK_HOME=/tmp/kit/kit/site/pyspark SPARK_LOCAL_IP=127.0.0.1 PYSPARK_PYTHON="$PY" PYTHONUNBUFFERED=1
