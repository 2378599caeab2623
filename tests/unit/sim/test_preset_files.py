from __future__ import annotations

from pathlib import Path

import pytest
from warmfront.errors import ConfigError
from warmfront.sim.latency import PRESETS, preset, save_preset


@pytest.mark.parametrize("name", ["demo", "dynamo-mocker"])
def test_a_saved_preset_is_used_by_its_path(tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine.json"
    save_preset(path, PRESETS[name], source="a test")
    assert preset(str(path)) == preset(name)
    assert preset(str(path), speed=2.0) == preset(name, speed=2.0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not a preset"),
        ('{"source": "x"}', "preset"),
        ('{"source": "x", "preset": {}, "more": 1}', "is not a preset"),
    ],
)
def test_a_file_that_is_no_preset_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"broken.json.*{said}"):
        preset(str(path))


def test_a_constant_that_cannot_be_is_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    save_preset(path, PRESETS["demo"], source="a test")
    path.write_text(path.read_text().replace('"base_s": 0.018', '"base_s": -1.0'))
    with pytest.raises(ConfigError, match="base_s"):
        preset(str(path))


def test_unknown_names_and_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no preset 'h200'; known: demo"):
        preset("h200")
    with pytest.raises(ConfigError, match="cannot read"):
        preset(str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match=r"ends with \.json"):
        save_preset(tmp_path / "none.toml", PRESETS["demo"], source="a test")
