"""Random worlds for property tests."""

from __future__ import annotations

from hypothesis import strategies as st
from msgspec.structs import replace
from warmfront.types import EngineLoad

from support.routing import PlainIndex, World, replica

SLOTS = 12


def random_world(draw: st.DataObject) -> World:
    """Make a fleet of unlike replicas with work in flight and something in every cache."""
    world = World(0)
    states = []
    for slot in range(SLOTS):
        capacity = draw.draw(st.sampled_from([None, 8000, 200_000]))
        block_size = draw.draw(st.sampled_from([None, 16, 32]))
        running = draw.draw(st.sampled_from([None, 0.0, 12.0]))
        events = draw.draw(st.sampled_from(["live", "stale"]))
        state = replica(slot, capacity_tokens=capacity, block_size=block_size, events=events)
        load = EngineLoad(running=running, kv_usage=0.5, rtt_s=draw.draw(st.sampled_from([None, 0.001, 0.08])))
        states.append(replace(state, replica=replace(state.replica, load=load)))
    world.set_fleet(states)
    learned = world.router._pools["m"].fleet.learned
    for slot in range(SLOTS):
        learned.prefill.scale[slot] = draw.draw(st.floats(0.3, 3.0))
        fill(world.index, slot, draw)
    for _ in range(draw.draw(st.integers(0, 25))):
        world.now_s += draw.draw(st.floats(0, 0.5))
        dispatch = world.send(prefix_key=draw.draw(st.integers(0, 3)), prompt_tokens=draw.draw(st.integers(1, 9000)))
        if draw.draw(st.booleans()):
            world.first_token(dispatch)
        if draw.draw(st.booleans()):
            world.finish(dispatch, cached_tokens=draw.draw(st.integers(0, 2000)))
    return world


def fill(index: PlainIndex, slot: int, draw: st.DataObject) -> None:
    index.resident[slot] = draw.draw(st.integers(0, 200_000))
    index.evicted[slot] = draw.draw(st.integers(0, 10_000))
    index.regretted[slot] = draw.draw(st.integers(0, index.evicted[slot]))
    for key in range(4):
        index.held[(slot, key)] = draw.draw(st.sampled_from([0, 0, 64, 1600, 8000]))
        index.host[(slot, key)] = draw.draw(st.sampled_from([0, 0, 3200]))
