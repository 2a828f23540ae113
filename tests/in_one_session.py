"""Script: what several modules run, one after another in one session: each has a function ``run``."""

from __future__ import annotations

import importlib

from launch import answer, session, spec


def main() -> None:
    given = spec()
    with session(given["master"], **given["settings"]) as spark:
        answer(
            {
                name: importlib.import_module(name).run(spark, **part)
                for name, part in given["parts"].items()
            }
        )


if __name__ == "__main__":
    main()
