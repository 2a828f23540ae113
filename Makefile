PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.setup-stamp
# Java's classes of a Spark session are in an archive, for the many that tests start, and for users'.
ARCHIVE := .venv/.archive-stamp
# Processes take a file of tests at a time. Each waits for a third of its time, so three keep two cores
# busy; tests that soak have clusters of their own.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

# A laptop whose host name does not resolve works too.
SPARK_LOCAL_IP ?= 127.0.0.1
export SPARK_LOCAL_IP
# Everything runs in .venv, whatever Spark or Python the calling shell prefers.
export PYSPARK_PYTHON := $(CURDIR)/$(BIN)/python
unexport SPARK_HOME SPARK_CONF_DIR PYSPARK_DRIVER_PYTHON PYTHONPATH VIRTUAL_ENV
# Each of the many processes would compile all of its libraries again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all matrix lint docs check bench format clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(ARCHIVE)  ## build .venv, with Spark set up in it
	@:

# Spark's own script would look for itself by PYSPARK_PYTHON, and cannot where that has a blank.
train: $(STAMP)  ## train the example job
	@SPARK_HOME='$(CURDIR)/$(BIN)/spark-distribution' $(BIN)/spark-submit jobs/train.py --config conf/digits.yaml

test: $(ARCHIVE)  ## run the tests
	@$(PYTEST) -n 3

test-all: $(ARCHIVE)  ## run all tests: also those that take minutes, those without Linux's own, the matrix
	@$(PYTEST) -n 2 -m ""
	@PYTHONPATH=tests/as_on_macos $(PYTEST) -n 2 -m "not spark and not linux and not soak"
	@$(BIN)/python tests/matrix/cells.py all

matrix: $(STAMP)  ## run what matters with other versions of Spark, Python and libraries
	@$(BIN)/python tests/matrix/cells.py all

lint: $(STAMP)  ## check format, style, types and rooms
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary sparkdl
	@$(BIN)/lint-imports --no-logo

docs: $(STAMP)  ## build the documentation, as build/site/index.html
	@$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/doctrees . build/site

check: $(STAMP)  ## what CI runs: lint; beside it, the documentation and Java's archive; then the tests
	@$(MAKE) --no-print-directory -j 2 $(ARCHIVE) lint docs
	@$(MAKE) --no-print-directory test

bench: $(STAMP)  ## measure everything beside its baselines: half an hour
	@$(BIN)/python benchmarks/suite.py

format: $(STAMP)  ## format the code and fix what ruff can fix
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

clean:  ## remove caches and build products; keeps .venv and runs/
	@rm -rf build dist spark-warehouse artifacts metastore_db derby.log .pytest_cache \
	  .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt conf/spark-defaults.conf conf/log4j2.properties
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "sparkdl needs Python 3.11 or newer: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@v=$$("$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version 2>&1 | \
	  sed -n 's/.* version "\([0-9]*\).*/\1/p'); [ "$${v:-0}" -ge 17 ] || \
	  { echo "Spark needs Java 17 or newer, on PATH or in JAVA_HOME" >&2; exit 1; }
	@echo "building .venv: Spark, PyTorch and what else it needs, some minutes the first time" >&2
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
# Spark reads its settings from the conf directory of the pip-installed pyspark. The link is where
# .venv/bin/spark-submit looks first, so it finds this Spark under any python3 on PATH.
	@home=$$($(BIN)/python -c 'import os, pyspark; print(os.path.dirname(pyspark.__file__))') && \
	  ln -sfn "$$home" $(BIN)/spark-distribution && mkdir -p "$$home/conf" && \
	  cp conf/log4j2.properties "$$home/conf/" && \
	  { cat conf/spark-defaults.conf; printf '\n# Added by make setup.\n%s %s\n' \
	    spark.pyspark.python '$(CURDIR)/$(BIN)/python'; } > "$$home/conf/spark-defaults.conf"
	@touch $@

$(ARCHIVE): $(STAMP)
	@$(BIN)/python -m sparkdl archive || echo "without the archive sessions start slower" >&2
	@touch $@
