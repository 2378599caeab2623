"""Small pieces of the page: tables, and the list of what differs with its reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

NO_REASON = "not explained yet"


class Difference(NamedTuple):
    """Something that is further apart than the check allows."""

    subject: str
    """Reasons are written by subject; one subject may differ in several figures."""
    told: str
    """Figure, both values, and how far they are apart."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; all columns but the first are right-aligned."""
    lines = [head, ["---", *("--:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def listed(title: str, differences: Sequence[Difference], reasons: Mapping[str, str], *, section: str) -> str:
    """Return the differences by subject, each subject with its reason.

    Raises:
        ValueError: There is a reason for something that does not differ.
    """
    subjects = list(dict.fromkeys(difference.subject for difference in differences))
    if idle := set(reasons) - set(subjects):
        raise ValueError(f"{section}: reasons for what does not differ: {', '.join(sorted(idle))}")
    if not subjects:
        return f"### {title}\n\nNothing."
    paragraphs = [f"### {title}"]
    for subject in subjects:
        told = "\n".join(f"- {difference.told}" for difference in differences if difference.subject == subject)
        paragraphs.append(f"**{subject}**\n\n{told}\n\nWhy: {reasons.get(subject, NO_REASON)}")
    return "\n\n".join(paragraphs)


def signed(share: float) -> str:
    """Return a share as a signed percentage."""
    return f"{100 * share:+.1f} %"


def milliseconds(value: float) -> str:
    """Return milliseconds with as many digits as matter."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def seconds(value: float) -> str:
    """Return seconds with as many digits as matter."""
    return f"{value:.1f} s" if value >= 10 else f"{value:.3f} s"
