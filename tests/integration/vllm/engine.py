"""Real vLLM servers with a tiny model of random weights."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from pathlib import Path

from support.service import Service, free_port

BLOCK_SIZE = 128
"""Tokens in a block of vLLM's CPU backend."""
MODEL = "tiny"
ADAPTERS = ("north", "south")
MODEL_LEN_MAX = 16384
RUNNING = re.compile(r"^vllm:num_requests_running\{[^}]*\} (\S+)$", re.MULTILINE)


class Engine(Service):
    """One vLLM server with KV events and replay.

    Args:
        environment: What `scripts/vllm_env.py` built.
        log: File that receives the server's output.
        blocks: KV blocks, the unusable null block included; `None` lets the engine size its cache.
    """

    name = "vLLM"
    start_timeout_s = 900.0  # two busy cores need minutes to import torch in every process of it; 40 s when idle

    def __init__(self, environment: Path, log: Path, *, blocks: int | None = None) -> None:
        super().__init__(log)
        self.environment = environment
        self.blocks = blocks
        self.events_port = free_port()
        self.replay_port = free_port()

    def running(self) -> float:
        """Return how many requests the engine is working on."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            return sum(float(value) for value in RUNNING.findall(answer.read().decode()))

    def command(self) -> list[str]:
        models = self.environment / "models"
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": "kv-events",
        }
        command = [str(self.environment / "bin/vllm"), "serve", str(models / MODEL)]
        command += ["--served-model-name", MODEL, "--load-format", "dummy", "--enforce-eager", "--dtype", "bfloat16"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--max-model-len", str(self._model_len())]
        command += ["--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)]
        if self.blocks is not None:
            return [*command, "--num-gpu-blocks-override", str(self.blocks)]
        command += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules"]
        return [*command, *(f"{name}={models / name}" for name in ADAPTERS)]

    def variables(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{self.environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers share few cores
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def _model_len(self) -> int:
        return MODEL_LEN_MAX if self.blocks is None else (self.blocks - 2) * BLOCK_SIZE
