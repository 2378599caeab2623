"""The script that prepares real engines writes what they can read."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "scripts/vllm_env.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_env", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_folder_follows_the_environment(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv("WARMFRONT_VLLM_ENV", raising=False)
    assert script.folder() == Path("/cache/warmfront/vllm-0.32.0")
    monkeypatch.setenv("WARMFRONT_VLLM_ENV", "/elsewhere")
    assert script.folder() == Path("/elsewhere")


def test_an_adapter_is_a_safetensors_file_of_the_models_shapes(script: ModuleType) -> None:
    shapes = {"a": (2, 3), "b": (1, 4)}
    content = script._safetensors(shapes, seed="x")
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert {name: tuple(entry["shape"]) for name, entry in header.items()} == shapes
    assert header["b"]["data_offsets"] == [24, 40]
    assert len(content) == 8 + length + 40
    assert content == script._safetensors(shapes, seed="x") != script._safetensors(shapes, seed="y")


def test_a_model_folder_is_written_once(script: ModuleType, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    script.write_model(tmp_path / "model", tokenizer)
    written = {path.name: path.stat().st_ino for path in (tmp_path / "model").iterdir()}
    assert set(written) == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    script.write_model(tmp_path / "model", tokenizer)
    assert written == {path.name: path.stat().st_ino for path in (tmp_path / "model").iterdir()}
