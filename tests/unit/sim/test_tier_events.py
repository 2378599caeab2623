"""Slower tiers of the model: what it says of them, and how that is published."""

from __future__ import annotations

import zmq
from warmfront import core
from warmfront.reference.request import Dropped, EngineRequest, Offloaded, Removed, Stored
from warmfront.sim.engine import Engine, EngineConfig
from warmfront.sim.latency import preset
from warmfront.sim.server.publisher import KvPublisher, PublisherConfig

CONFIG = EngineConfig(
    latency=preset("demo").latency,
    blocks=6,
    block_size=4,
    max_model_tokens=20,
    max_batched_tokens=64,
    max_sequences=4,
    host_blocks=1,
    disk_blocks=1,
)
ATTEMPTS_MAX = 500


def prompt(first: int) -> EngineRequest:
    return EngineRequest(str(first), 17, 1, [first + block for block in range(4)])


def test_an_evicted_block_is_moved_before_it_is_removed_and_falls_from_tier_to_tier() -> None:
    engine = Engine(CONFIG)
    for first in (10, 20):
        engine.submit(prompt(first))
        result = engine.step()
    assert [event for event in result.events if not isinstance(event, Stored)] == [
        Offloaded(13, "cpu"),
        Removed(13),
        Offloaded(12, "cpu"),
        Offloaded(13, "disk"),
        Dropped(13, "cpu"),
        Removed(12),
        Offloaded(11, "cpu"),
        Offloaded(12, "disk"),
        Dropped(13, "disk"),
        Dropped(12, "cpu"),
        Removed(11),
        Offloaded(10, "cpu"),
        Offloaded(11, "disk"),
        Dropped(12, "disk"),
        Dropped(11, "cpu"),
        Removed(10),
    ]


def test_moves_are_published_as_placeholders_of_their_tier() -> None:
    publisher = KvPublisher(PublisherConfig(endpoint="tcp://127.0.0.1:0"), block_size=4)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        socket.connect(publisher.source["endpoint"])
        for _ in range(ATTEMPTS_MAX):  # What is published before the subscription has arrived is lost.
            publisher.publish([Offloaded(7, "cpu"), Offloaded(7, "disk"), Dropped(7, "cpu")])
            if socket.poll(10):
                break
        _, _, payload = socket.recv_multipart()
    publisher.close()
    _, events, _, _ = core.decode_batch(payload)
    assert [(event["type"], event["tier"], event["block_hashes"]) for event in events] == [
        ("stored", "cpu", [7]),
        ("stored", "disk", [7]),
        ("removed", "cpu", [7]),
    ]
