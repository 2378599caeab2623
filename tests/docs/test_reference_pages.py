"""Reference pages and the code they describe say the same."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from warmfront import config_schema, errors
from warmfront.cli import COMMANDS
from warmfront.obs.catalog import METRICS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """The generator, which is a script."""
    spec = importlib.util.spec_from_file_location("docs_generator", ROOT / "scripts" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_generator"] = module
    spec.loader.exec_module(module)
    return module


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")


def test_every_generated_page_is_up_to_date(pages: ModuleType) -> None:
    assert pages.stale(ROOT) == [], "run scripts/docs.py"


def test_a_page_that_was_edited_or_is_missing_is_noticed(pages: ModuleType, tmp_path: Path) -> None:
    for path, write in pages.PAGES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(write(), encoding="utf-8")
    assert pages.stale(tmp_path) == []
    (tmp_path / "docs/reference/metrics.md").write_text("edited", encoding="utf-8")
    (tmp_path / "docs/reference/errors.md").unlink()
    assert pages.stale(tmp_path) == ["docs/reference/metrics.md", "docs/reference/errors.md"]


def test_the_metrics_page_names_every_metric_and_no_other() -> None:
    assert set(re.findall(r"`(warmfront_[a-z_]+)`", page("metrics.md"))) == {metric.name for metric in METRICS}


def test_the_command_page_names_every_command() -> None:
    assert re.findall(r"^## `warmfront (\w+)`$", page("cli.md"), re.MULTILINE) == list(COMMANDS)


def test_the_configuration_page_names_every_field() -> None:
    text = page("configuration.md")
    for section in config_schema.sections():
        for field in section.fields:
            assert f"| `{field.path.rpartition('.')[2]}` |" in text, field.path


RUST_FACE = re.compile(r'face\((\d+), "(\w+)", "(\w+)"\)')


def rust_faces() -> set[tuple[int, str, str]]:
    source = (ROOT / "crates" / "warmfront-core" / "src" / "error.rs").read_text(encoding="utf-8")
    return {(int(status), kind, code) for status, kind, code in RUST_FACE.findall(source)}


def python_faces(base: type[errors.ClientError] = errors.ClientError) -> set[tuple[int, str, str]]:
    faces = set()
    for child in base.__subclasses__():
        if child.__module__ == errors.__name__:
            faces |= {(child.status, child.type, child.code)} | python_faces(child)
    return faces


ABSTRACT = {(errors.ClientError.status, errors.ClientError.type, errors.ClientError.code)}


@pytest.mark.bug(177)
def test_errors_have_the_same_faces_in_rust_and_python() -> None:
    assert rust_faces() | ABSTRACT == python_faces() | ABSTRACT


def test_the_errors_page_names_every_face() -> None:
    text = page("errors.md")
    for status, kind, code in rust_faces():
        assert f"| {status} | `{kind}` | `{code}` |" in text


def test_the_built_core_answers_with_the_same_faces() -> None:
    core = pytest.importorskip("warmfront.core", reason="the core is not built", exc_type=ImportError)
    assert set(core.error_faces()) == rust_faces()
