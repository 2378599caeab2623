"""OpenAPI 3.1 documents of the two ports, written by hand beside this file.

They describe what warmfront itself promises: paths, methods, its own answers and errors. Bodies of requests and answers
of engines pass through and are described as loosely as they are treated: an engine may take and give more.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Literal

import yaml

Port = Literal["clients", "admin"]


def document(port: Port) -> dict[str, Any]:
    """Return the document of one port, anchors expanded."""
    tree: dict[str, Any] = yaml.safe_load((files(__name__) / f"{port}.yaml").read_text(encoding="utf-8"))
    return {key: value for key, value in tree.items() if not key.startswith("x-")}
