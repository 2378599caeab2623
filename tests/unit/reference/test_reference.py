"""Rules of the reference that a reader can check by eye."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from warmfront import reference
from warmfront.errors import EventStreamError
from warmfront.types import RequestId, Slot

SLOT = Slot(0)


def payload(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def stored(names: list[int], tokens: list[int], parent: int | None = None) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


@pytest.fixture
def index() -> reference.Index:
    index = reference.Index(block_size=2)
    index.add_slot(SLOT)
    return index


def device(index: reference.Index, tokens: list[int], now_s: float = 0.0) -> Any:
    return index.overlap(reference.chain(tokens, 2), now_s)["device"]


def test_only_full_blocks_have_hashes() -> None:
    assert len(reference.chain(list(range(7)), 2)) == 3


def test_salt_separates_everything_behind_it() -> None:
    plain, salted = reference.chain([1, 2, 3, 4], 2), reference.chain([1, 2, 3, 4], 2, salt="s")
    assert not set(plain) & set(salted)


def test_copies_are_counted(index: reference.Index) -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [8]}
    index.apply(SLOT, reference.decode(payload(stored([7, 8], [1, 2, 3, 4]), stored([8], [3, 4], 7))), 0.0)
    index.apply(SLOT, reference.decode(payload(removed)), 0.0)
    assert device(index, [1, 2, 3, 4]) == [2]
    index.apply(SLOT, reference.decode(payload(removed)), 0.0)
    assert device(index, [1, 2, 3, 4]) == [1]


def test_a_prediction_that_nothing_confirms_is_counted(index: reference.Index) -> None:
    index.dispatch(RequestId(1), reference.chain([1, 2], 2), SLOT, 0.0)
    index.release(RequestId(1))
    assert device(index, [1, 2], 4.0) == [1]
    assert device(index, [1, 2], 5.0) == [0]
    assert index.slots[SLOT].unconfirmed == 1


def test_what_is_no_batch_is_an_event_stream_error() -> None:
    for junk in (b"", b"\xc0", payload(3), msgspec.msgpack.encode([1.5])):
        with pytest.raises(EventStreamError):
            reference.decode(junk)
