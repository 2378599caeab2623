"""stub"""
from __future__ import annotations
import json
from pathlib import Path
PAGE="docs/explanation/lab-checks.md"; DATA="docs/explanation/lab-checks.json"; REASONS="docs/explanation/lab-checks.reasons.toml"
def read(root): return json.loads((root/DATA).read_text())
def read_reasons(root): return {}
def render(data, reasons): return ""
