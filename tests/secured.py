"""Spark's security settings, for a test of their own and for the whole suite (``--secured``).

The suite gets them through a configuration directory, so that every JVM has them that a test starts,
whoever starts it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

import pyspark

SETTINGS = {
    "spark.authenticate": "true",
    "spark.authenticate.secret": secrets.token_hex(16),
    "spark.network.crypto.enabled": "true",
    "spark.io.encryption.enabled": "true",
}
_DIRECTORY = "SPARK_CONF_DIR"


def turn_on(folder: Path) -> None:
    """Let all sessions that this process or its children start have :data:`SETTINGS`.

    ``folder``: where the configuration is written; it has what the present one has, too.
    """
    present = Path(os.environ.get(_DIRECTORY) or Path(pyspark.__file__).parent / "conf")
    if present.is_dir():
        shutil.copytree(present, folder, dirs_exist_ok=True)
    with (folder / "spark-defaults.conf").open("a") as file:
        file.writelines(f"\n{key} {value}" for key, value in SETTINGS.items())
        file.write("\n")
    os.environ[_DIRECTORY] = str(folder)
    os.environ["SPARKDL_TESTS_SECURED"] = "true"


def environment() -> dict[str, str]:
    """What a process needs that is started without this one's environment."""
    on = "SPARKDL_TESTS_SECURED" in os.environ
    return {_DIRECTORY: os.environ[_DIRECTORY]} if on else {}
