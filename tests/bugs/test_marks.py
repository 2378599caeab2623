"""The page about bugs of other routers says what the tests are marked with."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """The generator, which belongs to the scripts."""
    spec = importlib.util.spec_from_file_location("bugs_page", ROOT / "scripts" / "bugs_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bugs_page"] = module
    spec.loader.exec_module(module)
    return module


def test_every_mark_names_a_bug_of_the_list(page: ModuleType) -> None:
    known = {bug.id for bug in page.bugs(ROOT)}
    strange = {number: names for number, names in page.marked(ROOT).items() if number not in known}
    assert strange == {}


def test_every_bug_is_tested_or_concerns_what_is_not_built_or_is_known_to_be_open(page: ModuleType) -> None:
    tested = page.marked(ROOT).keys()
    forgotten = [bug.id for bug in page.bugs(ROOT) if bug.id not in tested and not bug.absent and not bug.open]
    assert forgotten == []


def test_what_is_said_not_to_be_built_has_no_test(page: ModuleType) -> None:
    tested = page.marked(ROOT)
    assert {bug.id: tested[bug.id] for bug in page.bugs(ROOT) if bug.absent and bug.id in tested} == {}


def test_ids_are_unique_and_in_order(page: ModuleType) -> None:
    ids = [bug.id for bug in page.bugs(ROOT)]
    assert ids == sorted(set(ids))


def test_marks_are_found_in_both_languages(page: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("@pytest.mark.bug(1, 2)\n@other\nasync def test_it() -> None: ...\n")
    (tmp_path / "crates" / "c" / "src").mkdir(parents=True)
    marked = '// bug 2, 3\n// bug 4\n#[tokio::test(flavor = "x")]\nasync fn it_is() {}\n\n'
    rust = marked + "// bug 9 of another kind\nfn f() {}\n"
    (tmp_path / "crates" / "c" / "src" / "a.rs").write_text(rust)
    python, in_rust = "tests/test_a.py::test_it", "crates/c/src/a.rs::it_is"
    assert page.marked(tmp_path) == {1: [python], 2: [python, in_rust], 3: [in_rust], 4: [in_rust]}
