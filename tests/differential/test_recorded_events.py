"""Recorded vLLM events through both indexes, batch by batch."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from warmfront import _core, reference
from warmfront.types import Slot

FIXTURES = Path(__file__).parents[1] / "fixtures" / "vllm"
SEED = 3


def payloads(name: str, **keep: Any) -> list[bytes]:
    lines = [json.loads(line) for line in (FIXTURES / name).read_text().splitlines()]
    wanted = [line for line in lines if all(line.get(key) == value for key, value in keep.items())]
    return [b64decode(line["payload_b64"]) for line in wanted if "payload_b64" in line]


def prompts(name: str) -> list[tuple[list[int], str | None, str | None]]:
    found = []
    for line in map(json.loads, (FIXTURES / name).read_text().splitlines()):
        body = line.get("body", {})
        prompt, model = body.get("prompt"), body.get("model", "")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            found.append((prompt, model if model.startswith("adapter") else None, body.get("cache_salt")))
    return found


@pytest.mark.bug(41)
@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        ("events_main_int_bs128.jsonl", 128),
        ("events_main2_full_mode_reset_lora.jsonl", 128),
        ("events_full_mode_storm.jsonl", 128),
        ("events_bytes_bs32_sha256cbor.jsonl", 32),
        ("events_hybrid_swa_full_bs32.jsonl", 32),
        ("events_offload_synthetic.jsonl", 16),
    ],
)
def test_recorded_events_leave_both_indexes_alike(name: str, block_size: int) -> None:
    core, plain = _core.Index(block_size=block_size, seed=SEED), reference.Index(block_size=block_size)
    core.add_slot(0)
    plain.add_slot(Slot(0))
    asked = prompts(name)
    for payload in payloads(name):
        ours, theirs = core.apply(0, payload, 0.0), plain.apply(Slot(0), reference.decode(payload), 0.0)
        assert {key: value for key, value in ours.items() if value} == {k: v for k, v in theirs.items() if v}
        stats = core.stats(1)
        assert {key: stats[key] for key in plain.stats()} == plain.stats()
    for prompt, adapter, salt in asked:
        hashes = _core.hash_tokens(prompt, block_size, SEED, adapter, salt)
        fast = core.overlap(hashes, 0.0)
        slow = plain.overlap(reference.chain(prompt, block_size, adapter=adapter, salt=salt), 0.0)
        del fast["frontier_key"], slow["frontier_key"]
        assert fast == slow


def test_every_recorded_encoding_decodes_alike() -> None:
    for payload in payloads("events_encodings_by_version.jsonl"):
        ts, events, rank, unknown = _core.decode_batch(payload)
        plain = reference.decode(payload)
        assert (ts, rank, unknown, len(events)) == (plain.ts, plain.rank, plain.unknown_events, len(plain.events))
        for fast, slow in zip(events, plain.events, strict=True):
            assert_alike(fast, slow)


def assert_alike(fast: dict[str, Any], slow: reference.Stored | reference.Removed | reference.Cleared) -> None:
    match slow:
        case reference.Stored():
            for key in ("block_hashes", "parent", "token_ids", "block_size", "lora_id", "lora_name", "kind", "window"):
                assert fast[key] == getattr(slow, key)
            assert (fast["tier"], fast["group"]) == (slow.tier, slow.group)
        case reference.Removed():
            assert (fast["block_hashes"], fast["tier"], fast["group"]) == (slow.block_hashes, slow.tier, slow.group)
        case reference.Cleared():
            assert fast == {"type": "cleared"}
