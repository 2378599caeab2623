"""Events and commands mean the same in Rust and in Python: every variant crosses the boundary."""

from __future__ import annotations

from typing import get_args

import msgspec
from warmfront import core, errors, types
from warmfront.types import (
    Answered,
    Arrived,
    Asked,
    Cancelled,
    Choice,
    ConfigChanged,
    Deliver,
    Dispatch,
    EventSource,
    EventState,
    Failed,
    Finished,
    FirstToken,
    FleetChanged,
    FleetState,
    Moved,
    Paced,
    PoolState,
    ReplicaState,
    ReplicaUpdate,
    Request,
    RequestId,
    Shed,
    Slot,
    Standing,
    Stopping,
    Tick,
    Usage,
)

SEVEN = RequestId(7)

REQUEST = Request(
    id=SEVEN,
    time_s=1.5,
    pool="tiny",
    model="tiny-north",
    adapter="north",
    flow="tenant",
    priority=-3,
    route="prefix",
    basis="tokens",
    prompt_tokens=4097,
    blocks=256,
    turn=2,
    output_tokens_max=64,
    affinity_key=2**64 - 1,
    prefix_key=2**63,
    stream=True,
    fallback="media",
    deadline_s=61.5,
)

REPLICA = ReplicaUpdate(
    id="http://engine:8000#1",
    url="http://engine:8000",
    rank=1,
    engine="vllm",
    ready=True,
    incarnation=9,
    block_size=16,
    capacity_tokens=2**20,
    events=EventSource(endpoint="tcp://engine:5558"),
)

FLEET = FleetState(
    version=11,
    pools=[
        PoolState(
            name="tiny",
            models={"tiny": None, "tiny-north": "north"},
            tokens="exact",
            tokens_reason=None,
            replicas=[
                ReplicaState(
                    slot=Slot(4), replica=REPLICA, events=EventState(state="live", last_sequence=3, lag_s=0.25)
                )
            ],
        )
    ],
)

EVENTS = [
    Arrived(REQUEST),
    Moved(SEVEN, 2.0, Slot(3)),
    FirstToken(SEVEN, 2.5, Slot(3)),
    Finished(SEVEN, 3.0, Slot(3), 200, Usage(prompt_tokens=10, cached_tokens=8), 12),
    Failed(SEVEN, 3.5, "rejected", [Slot(1), Slot(2)], True, 503, 2.5, True),
    Cancelled(SEVEN, 4.0),
    FleetChanged(4.5, FLEET),
    ConfigChanged(5.0, b"{}"),
    Paced(5.5, "tiny", [Slot(0), Slot(2)], [3, 4], [0.5, 0.25]),
    Tick(6.0),
    Asked(RequestId(8), 6.5, "explain", REQUEST, b"{}"),
    Stopping(7.0, 30.0),
]


def test_every_event_of_the_core_is_read_as_it_was_meant() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(types.Event))
    assert msgspec.msgpack.decode(core.sample_events(), type=list[types.Event]) == EVENTS


def test_every_command_is_read_by_the_core_as_it_was_meant() -> None:
    commands: list[types.Command] = [
        Dispatch(SEVEN, [Choice(Slot(2), 48), Choice(Slot(0), 0, Slot(1))], "warm"),
        Shed(SEVEN, "queue_timeout", 1.5),
        Shed(SEVEN, "no_ready_replica"),
        Answered(RequestId(8), 404, b"{}"),
        Deliver(SEVEN),
        Standing("tiny", [(Slot(2), "open", "connect")]),
    ]
    assert {type(command) for command in commands} == set(get_args(types.Command))
    assert core.read_commands(msgspec.msgpack.encode(commands)) == [
        "Dispatch { id: 7, choices: [Choice { slot: 2, cached_tokens: 48, prefill_slot: None }, "
        'Choice { slot: 0, cached_tokens: 0, prefill_slot: Some(1) }], reason: "warm" }',
        'Shed { id: 7, code: "queue_timeout", retry_after_s: Some(1.5) }',
        'Shed { id: 7, code: "no_ready_replica", retry_after_s: None }',
        'Answered { id: 8, status: 404, body: b"{}" }',
        "Deliver { id: 7 }",
        'Standing { pool: "tiny", rows: [Standing { slot: 2, state: "open", reason: "connect" }] }',
    ]


def test_a_batch_that_is_no_list_of_commands_is_refused() -> None:
    for batch in (b"", b"\xc1", msgspec.msgpack.encode([["dispatch", 7]]), msgspec.msgpack.encode([["no_such", 7]])):
        try:
            core.read_commands(batch)
        except errors.CoreError:
            continue
        raise AssertionError(f"{batch!r} was taken")
