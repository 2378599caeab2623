"""The page stands alone: it says what the results say, and asks nobody for anything."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from support.lab_figures import figures, regime, results, three_policies, two_classes
from warmfront.lab.results import Cell

pytest.importorskip("matplotlib", reason="the extra lab is not installed")
from warmfront.lab.html import render
from warmfront.lab.plots import CURVES, lines, plot

LOADS = {"src", "href", "xlink:href", "data", "action", "poster", "srcset", "background"}
"""Attributes by which a page fetches something."""


@pytest.fixture(scope="module")
def page() -> str:
    return render(three_policies())


class Reader(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.classes: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in LOADS]
        self.classes += [value or "" for name, value in attrs if name == "class"]


def test_the_page_refers_to_nothing_outside_itself(page: str) -> None:
    read = Reader(page)
    assert [link for link in read.fetched if not link.startswith("#")] == []
    assert [link for link in re.findall(r"url\(([^)]*)\)", page) if not link.startswith("#")] == []
    assert not re.search(r"https?://|@import", page)
    assert not {"script", "link", "iframe", "object", "embed", "img"} & set(read.tags)


def test_every_regime_has_every_plot_with_every_policy(page: str) -> None:
    read = Reader(page)
    assert read.tags.count("svg") == len(CURVES)
    for number in range(3):
        assert read.classes.count(f"policy-{number}") == len(CURVES)
        assert f"body:has(#show-{number}:not(:checked)) .policy-{number}" in page
    for curve in CURVES:
        assert curve.metric.title in page


def test_text_and_axes_have_the_colour_of_the_page(page: str) -> None:
    assert "#010203" not in page
    assert "color-scheme: light dark" in page
    drawn = page[page.index("<svg") : page.rindex("</svg>")]
    assert not re.search(r"(fill|stroke): (#000000|black|white|#ffffff)", drawn)


def test_losing_cells_and_what_reproduces_them_are_on_the_page(page: str) -> None:
    assert '<td class="lost">1.00 s (0.80)</td>' in page
    assert '<td class="best">0.800 s (1.00)</td>' in page
    assert "<pre>warmfront simulate chat</pre>" in page
    assert "seeds 1, 2" in page


def test_names_cannot_break_the_page() -> None:
    hostile = "<script>alert(1)</script>"
    made = results(Cell("chat", hostile, 4.0, figures()))
    assert "script" not in Reader(render(made)).tags


def test_the_same_results_give_the_same_page(page: str) -> None:
    assert render(three_policies()) == page


def test_a_plot_of_nothing_but_infinite_points_is_empty_and_not_an_error() -> None:
    made = results(Cell("chat", "a", 4.0, figures(ttft_p99_s=None)), regimes=(regime(),))
    (curve,) = [curve for curve in CURVES if curve.metric.field == "ttft_p99_s"]
    assert plot(curve, made, "chat", lines(["a"], "marginal_cost")).startswith("<svg")


def test_groups_have_tables_of_their_own_and_what_is_not_judged_is_not_marked() -> None:
    made = render(two_classes())
    assert "<h4>serving at 4, people</h4>" in made
    assert "people: the same; batch: TTFT 60 s, TPOT 100 ms, by goodput alone" in made
    assert '<td class="">8.00 s (0.12)</td>' in made
    assert '<td class="lost">0.400 s (0.50)</td>' in made
    assert len(re.findall(r"<tr><td>peer</td>", made)) == 3  # all, and two groups
