#!/usr/bin/env bash
# Pack what a GPU machine without a network (Python 3.12 with torch; no Java, no Spark) lacks to run the tests and
# benchmarks: a Java runtime, Spark with only the jars that training loads, and Python packages. Run it in the project's
# root after `make setup`: it takes three minutes and writes .gpu/kit-aa, -ab and -ac, 54 MiB each, and .gpu/unpack.sh.
# PYVER=3.11 packs for another Python.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
pyver=${PYVER:-3.12}
python=.venv/bin/python
[ -x "$python" ] || { echo "run make setup first" >&2; exit 1; }
grep -qx '/.gpu/' .git/info/exclude 2>/dev/null || echo '/.gpu/' >> .git/info/exclude
rm -rf .gpu && mkdir -p .gpu/wheels .gpu/kit/site
spark=$("$python" -c 'import os, pyspark; print(os.path.dirname(pyspark.__file__))')

# Java: only the modules that Spark uses, uncompressed, so that xz can.
"${JAVA_HOME:+$JAVA_HOME/bin/}jlink" --strip-debug --no-header-files --no-man-pages --compress=0 --output .gpu/kit/jre \
  --add-modules java.base,java.desktop,java.logging,java.management,java.naming,java.net.http,java.rmi,java.scripting,java.security.jgss,java.security.sasl,java.sql,java.transaction.xa,java.xml,java.instrument,java.compiler,jdk.crypto.ec,jdk.incubator.vector,jdk.jfr,jdk.management,jdk.net,jdk.security.auth,jdk.security.jgss,jdk.unsupported,jdk.zipfs 2>/dev/null

# Spark: the Python package, its scripts, and the jars named in jars.txt, stored without compression.
tar -C "$spark/.." --exclude=jars --exclude=examples --exclude=data --exclude='*/tests' --exclude=pyspark/work --exclude=__pycache__ \
  --exclude=pyspark/pandas -cf - pyspark | tar -C .gpu/kit/site -xf -
"$python" - "$spark/jars" "$here/jars.txt" .gpu/kit/site/pyspark/jars <<'PY'
import re, sys, zipfile
from pathlib import Path
source, names, target = Path(sys.argv[1]), Path(sys.argv[2]).read_text().split(), Path(sys.argv[3])
target.mkdir(parents=True)
for jar in sorted(source.glob("*.jar")):
    stem = re.sub(r"-[0-9][0-9A-Za-z.]*(-[A-Za-z0-9]+)?$", "", jar.stem)
    if stem not in names:
        continue
    with zipfile.ZipFile(jar) as old, zipfile.ZipFile(target / jar.name, "w", zipfile.ZIP_STORED) as new:
        for entry in old.infolist():  # with its directories, which Spark looks up; no index, which names all jars
            foreign = re.search(r"\.(so|dll|dylib|jnilib|a)$", entry.filename) and not re.search(r"linux/(amd64|x86_64)|linux-x86_64", entry.filename.lower())
            if entry.filename != "META-INF/INDEX.LIST" and not foreign:
                new.writestr(entry.filename, old.read(entry))
PY
cp "$here/unpack.sh" .gpu/unpack.sh
mkdir -p .gpu/kit/site/pyspark/conf && cp conf/spark-defaults.conf conf/log4j2.properties .gpu/kit/site/pyspark/conf/

# Python packages of the versions that this project pins, for that machine's Python.
pins=$("$python" -m pip freeze | grep -iE '^(pyarrow|pandas|py4j|tqdm|safetensors|pytest|pytest-timeout|hypothesis|sortedcontainers|pytz|tzdata|python-dateutil|six|iniconfig|pluggy|packaging)==')
platforms=(); for n in 39 35 34 31 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any)
"$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version "$pyver" --implementation cp \
  "${platforms[@]}" -d .gpu/wheels $pins 2>&1 | grep -v 'is ignored: it is neither' || true
for wheel in .gpu/wheels/*.whl; do (cd .gpu/kit/site && "$OLDPWD/$python" -m zipfile -e "$OLDPWD/$wheel" .); done
rm -rf .gpu/wheels .gpu/kit/site/pyarrow/tests .gpu/kit/site/pandas/tests .gpu/kit/site/pyarrow/include
tar -C .gpu -cf - kit | xz -T0 -3 > .gpu/kit.tar.xz
rm -rf .gpu/kit
split -n 3 .gpu/kit.tar.xz .gpu/kit- && rm .gpu/kit.tar.xz
ls -l .gpu
