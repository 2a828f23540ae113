"""Names of this package that stand in strings, which no linter sees: each of them is there."""

from __future__ import annotations

import importlib
import re
import subprocess
from functools import cache
from pathlib import Path

from launch import ROOT

DOTTED = re.compile(r"\bsparkdl(?:\.[A-Za-z_]\w*)+")
IMPORTED = re.compile(r"from (sparkdl(?:\.\w+)*) import \(?([\w, \n]+)")
FILES = re.compile(r"\bsparkdl(?:/\w+)+\.py\b")
NO_NAMES = re.compile(r"sparkdl\.(zip|ml|planner|ema|evaluated|residual|process\.other)")
"""A file, rooms to come, and names of arrays."""


def texts() -> list[tuple[Path, str]]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py", "*.md", "*.toml", "*.yaml", "*.conf"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    paths = [ROOT / name for name in listed if name != "CHANGELOG.md"]
    return [(path, path.read_text()) for path in paths if path.exists()]


@cache
def resolves(name: str) -> bool:
    """Return whether ``name`` is a module, or an attribute of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            fields = getattr(found, "__dataclass_fields__", {})
            annotated = getattr(found, "__annotations__", {})
            if not hasattr(found, part) and part not in fields and part not in annotated:
                return False
            found = getattr(found, part, None)
        return True
    return False


def test_every_name_resolves() -> None:
    wrong = []
    for path, text in texts():
        if path == Path(__file__):
            continue
        found = set(FILES.findall(text))
        wrong += [f"{path}: {name}" for name in found if not (ROOT / name).exists()]
        names = {
            m[0]
            for m in DOTTED.finditer(text)
            if text[max(0, m.start() - 6) : m.start()] != "spark."
        }
        for module, imported in IMPORTED.findall(text):
            words = [word.split(" as ")[0].strip() for word in imported.split("\n\n")[0].split(",")]
            names |= {f"{module}.{word.split()[0]}" for word in words if word}
        for name in sorted(names):
            if not NO_NAMES.fullmatch(name) and not resolves(name):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == []
