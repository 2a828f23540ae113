"""The long description of a distribution: ``README.md`` with links that work on an index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = re.compile(r"(!?)\[([^\]]+)\]\((?!https?:|#|mailto:)([^)]+)\)")


class LongDescription(MetadataHookInterface):
    """Fills in ``readme``: links go below ``project.urls.Source``; without it they are text."""

    def update(self, metadata: dict[str, Any]) -> None:
        source = metadata.get("urls", {}).get("Source", "").rstrip("/")

        def link(found: re.Match[str]) -> str:
            image, text, path = found.groups()
            if not source:
                return "" if image else text
            return f"{image}[{text}]({source}/{'raw' if image else 'blob'}/main/{path})"

        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": _RELATIVE.sub(link, text)}
