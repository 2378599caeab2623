"""Replays a trace through Dynamo's mocker; runs in Dynamo's own environment and prints a JSON line for each request.

python dynamo_replay.py TRACE MODE REPLICAS BLOCKS SPEED

Nothing of warmfront is imported here. The mocker's defaults hold wherever this file names nothing: a block is 64
tokens, a pass 8,192 tokens and 256 sequences, timing is the polynomial one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from dynamo import _core  # type: ignore[import-not-found]  # only its own environment has it
from dynamo.llm import KvRouterConfig  # type: ignore[import-not-found]

BLOCK_TOKENS, TRACE_BLOCK_TOKENS = 64, 512
PASS_TOKENS, PASS_SEQUENCES = 8192, 256


def main() -> None:
    trace, mode, replicas, blocks, speed = sys.argv[1:]
    engine = {
        "backend": "vllm",
        "num_gpu_blocks": int(blocks),
        "block_size": BLOCK_TOKENS,
        "max_num_batched_tokens": PASS_TOKENS,
        "max_num_seqs": PASS_SEQUENCES,
    }
    router = {"router_config": KvRouterConfig()} if mode == "kv_router" else {}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "requests.jsonl"
        _core.run_mocker_trace_replay(
            [trace],
            extra_engine_args=_core._normalize_mocker_config({"engine": engine}),
            num_workers=int(replicas),
            replay_mode="offline",
            router_mode=mode,
            trace_block_size=TRACE_BLOCK_TOKENS,
            arrival_speedup_ratio=float(speed),
            report_jsonl_path=str(report),
            **router,
        )
        for line in report.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            told = {
                "worker": row["decode_worker_idx"],
                "prompt_tokens": row["input_length"],
                "output_tokens": row["output_length"],
                "cached_tokens": row["reused_input_tokens"],
                "arrived_ms": row["arrival_time_ms"],
                "first_token_ms": row["first_token_ms"],
                "last_token_ms": row["last_token_ms"],
            }
            print(json.dumps(told))


if __name__ == "__main__":
    main()
