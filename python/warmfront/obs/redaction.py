"""Masks what looks like a credential in text that leaves the process.

A second line of defence: nothing logs keys on purpose, but libraries quote requests in their errors. The core masks by
the same rules (`crates/warmfront-core/src/redact.rs`); a test feeds both with the same samples. Prompts cannot be told
from other text, so they must never be put into a message.
"""

from __future__ import annotations

import re

MASK = "***"

_CREDENTIALS = re.compile(
    r"""
    (?P<before>
        \b(?:bearer|basic)[ ]+                                                # a scheme, then the credential
        | \b(?:authorization|x-api-key|api[-_]?key|x-warmfront-gateway-secret)["']?[ ]*[:=]
          [ ]*["']?(?:(?:bearer|basic)[ ]+)?
    )
    [^\s"',;)}\]]+
    | \b(?:wfk_|sk-)[A-Za-z0-9_-]{8,}                                         # keys of ours and of OpenAI's form
    """,
    re.IGNORECASE | re.VERBOSE,
)


def redacted(text: str) -> str:
    """Return the text with every credential replaced by `***`."""
    return _CREDENTIALS.sub(lambda found: (found["before"] or "") + MASK, text)
