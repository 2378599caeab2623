"""Check that every crate we link is under a licence we may ship under, from `cargo metadata`; needs no network."""

from __future__ import annotations

import json
import re
import subprocess
import sys

ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "MPL-2.0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
}


def acceptable(expression: str) -> bool:
    """Tell whether an SPDX expression can be met with allowed licences alone."""
    tokens = re.findall(r"[()]|[^\s()/]+(?: WITH [^\s()/]+)?|/", expression)
    words = {"AND": "and", "OR": "or", "/": "or", "(": "(", ")": ")"}
    formula = " ".join(words.get(token, str(token in ALLOWED)) for token in tokens)
    return bool(formula) and bool(eval(formula, {"__builtins__": {}}))


def main() -> int:
    """Print each crate with another licence; return the exit code."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--all-features"]
    packages = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["packages"]
    bad = [p for p in packages if p["source"] is not None and not acceptable(p["license"] or "")]
    for package in bad:
        print(f"{package['name']} {package['version']}: licence {package['license']!r} is not allowed")
    print(f"{len(packages)} crates, {len(bad)} with a licence that is not allowed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
