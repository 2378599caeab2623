"""KV event payloads → values, plainly.

`[ts, [event, ...], rank]` in MessagePack; each event is an array with its tag first (vLLM up to 0.23) or a map (0.24
and later). Fields may be missing, unknown keys and further elements are ignored. What one would get wrong: hashes are
integers or digests, and a digest stands for its last eight bytes.

Source: vLLM `distributed/kv_events.py`, versions 0.9.2 to 0.33.0.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from warmfront.errors import EventStreamError
from warmfront.reference.blocks import Extras

STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
"""In array order; position 0 of the array is the tag."""

REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")

TIERS = {
    "cpu": "cpu",
    "host": "cpu",
    "fs": "disk",
    "obj": "disk",
    "storage": "disk",
    "disk": "disk",
    "remote": "remote",
}
"""Medium in lower case → tier; anything else is the device."""

KINDS = {
    "full_attention": "full",
    "mla_attention": "full",
    "sink_full_attention": "full",
    "sliding_window": "window",
    "sliding_window_mla": "window",
    "chunked_local_attention": "window",
    "mamba": "mamba",
    "encoder_only_attention": "other",
    "cross_attention": "other",
}


class Stored(Struct, frozen=True):
    """Blocks were stored. `block_size` is zero in placeholders of slower tiers."""

    block_hashes: list[int]
    parent: int | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    lora_name: str | None = None
    tier: str = "gpu"
    extra_keys: list[list[Any] | None] | None = None
    group: int | None = None
    kind: str | None = None
    window: int | None = None

    def extras(self, block: int) -> Extras:
        """Canonical extra keys of one block."""
        given = self.extra_keys[block] if self.extra_keys and block < len(self.extra_keys) else None
        return _canonical(self, given or [])


class Removed(Struct, frozen=True):
    """Blocks were removed."""

    block_hashes: list[int]
    tier: str = "gpu"
    group: int | None = None


class Cleared(Struct, frozen=True):
    """Everything on the device is gone."""


class Batch(Struct, frozen=True):
    """What one engine step changed, in order."""

    ts: float
    events: list[Stored | Removed | Cleared]
    rank: int | None = None
    unknown_events: int = 0


def decode(payload: bytes) -> Batch:
    """Decode one payload.

    Raises:
        EventStreamError: The payload is no batch of events.
    """
    try:
        ts, raw_events, *rest = msgspec.msgpack.decode(payload)
        events = [_event(raw) for raw in raw_events]
    except (msgspec.DecodeError, ValueError, TypeError, KeyError) as error:
        raise EventStreamError(f"not a batch of KV events: {error}") from error
    known = [event for event in events if event is not None]
    return Batch(float(ts), known, rest[0] if rest else None, len(events) - len(known))


def _event(raw: Any) -> Stored | Removed | Cleared | None:
    if isinstance(raw, dict):
        tag, fields = raw["type"], raw
    else:
        tag, *values = raw
        names = STORED_FIELDS if tag == "BlockStored" else REMOVED_FIELDS
        fields = dict(zip(names, values, strict=False))
    if tag == "BlockStored":
        return _stored(fields)
    if tag == "BlockRemoved":
        return Removed(
            [_hash(value) for value in fields["block_hashes"]], _tier(fields.get("medium")), fields.get("group_idx")
        )
    return Cleared() if tag == "AllBlocksCleared" else None


def _stored(fields: dict[str, Any]) -> Stored:
    parent, kind = fields.get("parent_block_hash"), fields.get("kv_cache_spec_kind")
    return Stored(
        block_hashes=[_hash(value) for value in fields["block_hashes"]],
        parent=None if parent is None else _hash(parent),
        token_ids=fields.get("token_ids") or [],
        block_size=fields.get("block_size") or 0,
        lora_id=fields.get("lora_id"),
        lora_name=fields.get("lora_name"),
        tier=_tier(fields.get("medium")),
        extra_keys=fields.get("extra_keys"),
        group=fields.get("group_idx"),
        kind=None if kind is None else KINDS.get(kind, "unknown"),
        window=fields.get("kv_cache_spec_sliding_window"),
    )


def _hash(value: int | bytes) -> int:
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    return value % (1 << 64)


def _tier(medium: str | None) -> str:
    return TIERS.get((medium or "").lower(), "gpu")


def _canonical(stored: Stored, keys: list[Any]) -> Extras:
    """Reduce untagged and tagged spellings to one. The served adapter name wins over what the keys say of it."""
    adapter = stored.lora_name
    texts: list[str] = []
    others: list[bytes | int] = []
    if adapter is None and stored.lora_id is not None and not keys:
        others.append(stored.lora_id)
    for position, key in enumerate(keys):
        match key:
            case [str("lora"), str(name), *_]:
                adapter = adapter or name
            case [str("mm"), str(identifier), _, *_]:
                texts.append(identifier)
            case [str("cache_salt"), str(salt), *_]:
                texts.append(salt)
            case [str("prompt_embeds"), bytes(digest), *_]:
                others.append(digest)
            case [str(identifier), *_]:
                texts.append(identifier)
            case str(text) if not (position == 0 and text == stored.lora_name):
                texts.append(text)
            case bytes() | int():
                others.append(key)
    return Extras(adapter, tuple(texts), tuple(others))
