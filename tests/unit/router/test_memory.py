"""The router's memory: everything that is learned comes back, and nothing that is broken does."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routing import World, busy, replica
from warmfront.config import CostConfig, GuardConfig, PolicyConfig
from warmfront.policy.estimators import Learned
from warmfront.policy.guard import Guard, Wealth
from warmfront.policy.watch import Watch
from warmfront.router import memory
from warmfront.router.accuracy import Accuracy
from warmfront.types import Answered, Asked, Paced, RequestId, Slot


def ask(world: World, question: str, payload: bytes) -> Answered:
    (answer,) = world.step(Asked(RequestId(7), world.now_s, question, None, payload))
    assert isinstance(answer, Answered)
    return answer


def pieces(world: World) -> Iterator[bytes]:
    """Ask for the whole memory as the core does."""
    following: str | None = ""
    while following is not None:
        body = ask(world, memory.TELL, following.encode()).body
        yield body
        following = msgspec.json.decode(body)["next"]


def told(world: World) -> list[dict[str, Any]]:
    return [msgspec.json.decode(piece) for piece in pieces(world)]


def experienced(replicas: int = 3, *, requests: int = 150) -> World:
    """Make a world that has served, been paced, and been told of load."""
    rng, world = random.Random(5), World(replicas)
    for number in range(requests):
        world.serve(
            first_token_s=rng.uniform(0.02, 0.4),
            duration_s=rng.uniform(0.2, 3.0),
            prefix_key=rng.randrange(12),
            prompt_tokens=rng.choice([320, 1600, 6400]),
            turn=rng.randrange(4),
        )
        if number % 10 == 0:
            slot = Slot(rng.randrange(replicas))
            dispatch = world.send(prefix_key=3)
            world.first_token(dispatch)
            world.now_s += 1.0
            world.step(Paced(world.now_s, "m", [slot], [20], [rng.uniform(0.2, 0.9)]))
            world.finish(dispatch, cached_tokens=0)
    world.set_fleet([busy(state, running=4.0, waiting=3.0, kv_usage=0.4) for state in world.states()])
    return world


def test_everything_that_is_learned_comes_back_in_a_router_that_starts_anew() -> None:
    old = experienced()
    new = World(0)
    for piece in pieces(old):
        assert ask(new, memory.TAKE, piece).status == 200
    new.set_fleet(old.states())
    before, after = told(old), told(new)
    for row in [*before, *after]:
        row["guard"].pop("stepped_ago_s", None)
        assert (row.pop("prefixes") != []) == bool(row["shared"])
        row.pop("adapters")
        for values in row["replicas"].values():
            values.pop("Sequences._reports")  # the report that came with the replica itself counts
    assert after == before
    assert before[0]["shared"]["PrefillModel.samples"] > 5
    assert before[0]["replicas"]["http://10.0.0.0:8000"]["Accuracy.answers"] > 5


def test_memory_that_comes_after_the_fleet_is_taken_up_too() -> None:
    old, new = experienced(), World(3)
    for piece in pieces(old):
        ask(new, memory.TAKE, piece)
    assert told(new)[0]["shared"] == told(old)[0]["shared"]


def test_a_replica_takes_up_its_own_memory_in_whatever_slot_it_is() -> None:
    old, new = experienced(), World(0)
    for piece in pieces(old):
        ask(new, memory.TAKE, piece)
    third = msgspec.structs.replace(old.states()[2], slot=Slot(0))
    new.set_fleet([third])
    name = third.replica.id
    assert told(new)[0]["replicas"][name]["DecodeModel.base"] == told(old)[0]["replicas"][name]["DecodeModel.base"]


def test_a_large_fleet_is_told_in_pieces_that_name_each_replica_once() -> None:
    world = World(3 * memory.REPLICAS_A_PIECE + 1)
    rows = told(world)
    assert [len(row["replicas"]) for row in rows] == [memory.REPLICAS_A_PIECE] * 3 + [1]
    assert len({name for row in rows for name in row["replicas"]}) == 3 * memory.REPLICAS_A_PIECE + 1
    assert [bool(row["shared"]) for row in rows] == [True, False, False, False]


def test_every_attribute_of_what_learns_is_kept_or_left_on_purpose() -> None:
    learned = Learned(CostConfig())
    for kept in memory.KEPT:
        where: Any = learned
        for part in kept.path.split(".") if kept.path else []:
            where = getattr(where, part)
        assert {*kept.shared, *kept.by_slot, *kept.left} == set(vars(where)), kept.path
    guard = Guard(GuardConfig(), scale_s=1.0)
    assert {*memory.GUARD_KEPT, *memory.GUARD_TESTS, *memory.GUARD_LEFT} == set(vars(guard))
    assert set(memory.GUARD_TEST_KEPT) == set(vars(Wealth()))
    assert {*memory.ACCURACY_KEPT, *memory.ACCURACY_LEFT} == set(vars(Accuracy("r")))
    assert set(memory.WATCH_KEPT) < set(vars(Watch(PolicyConfig())))


# A value of another shape, as another version or a broken peer might tell it.
BROKEN: list[Any] = [None, "x", -1e300, math.pi, 0, 0.0, -1, 1, True, [], [1.0], {}, [[1.0]], 10**400]


@pytest.mark.parametrize("broken", BROKEN, ids=repr)
def test_a_value_of_another_shape_leaves_the_prior_and_never_a_half(broken: Any) -> None:
    world, fresh = World(2), told(World(2))
    piece = msgspec.json.decode(next(pieces(experienced(2))))
    piece["shared"] = dict.fromkeys(piece["shared"], broken)
    piece["guard"]["values"] = dict.fromkeys(piece["guard"]["values"], broken)
    piece["replicas"] = {name: dict.fromkeys(values, broken) for name, values in piece["replicas"].items()}
    ask(world, memory.TAKE, msgspec.json.encode(piece))
    kept = told(world)
    for name, value in fresh[0]["shared"].items():
        assert memory._fits(kept[0]["shared"][name], value)
    assert kept[0]["guard"]["values"]["credit"] in memory.CREDITS
    assert world.send().choices  # and it goes on deciding


@pytest.mark.parametrize(("name", "count"), [(name, -1) for name in memory.GUARD_COUNTS] + [("_doublings", 10**29)])
def test_a_count_that_no_guard_can_have_leaves_a_new_guard(name: str, count: int) -> None:
    world = World(2)
    piece = msgspec.json.decode(next(pieces(experienced(2))))
    piece["guard"]["values"] |= {"credit": 0.5, name: count}
    ask(world, memory.TAKE, msgspec.json.encode(piece))
    assert told(world)[0]["guard"]["values"] == told(World(2))[0]["guard"]["values"]


def with_adapters(names: str = "abc") -> World:
    world = World(2)
    for name in names:
        world.serve(adapter=name, prompt_tokens=320)
    return world


def rates(world: World, key: str) -> dict[Any, float]:
    return {name: count * math.exp(-age_s / 60.0) for name, count, age_s in told(world)[0][key]}


def test_popularity_and_adapters_come_back_and_go_on_to_fade() -> None:
    old = with_adapters()
    for _ in range(5):
        old.serve(prefix_key=77)
    new = World(0)
    new.now_s = 1000.0
    for piece in pieces(old):
        ask(new, memory.TAKE, piece)
    new.set_fleet(old.states())
    for key, wanted in (("prefixes", 77), ("adapters", "c")):
        assert rates(new, key) == pytest.approx(rates(old, key))
        assert rates(new, key)[wanted] > 0.5
    assert told(new)[0]["resident"] == told(old)[0]["resident"] != {}
    before = rates(new, "prefixes")[77]
    new.pass_time(60.0)
    assert rates(new, "prefixes")[77] == pytest.approx(before / math.e, rel=0.01)


def test_a_replica_that_restarted_has_no_adapters() -> None:
    old, new = with_adapters(), World(0)
    for piece in pieces(old):
        ask(new, memory.TAKE, piece)
    restarted = [
        msgspec.structs.replace(state, replica=msgspec.structs.replace(state.replica, incarnation=9))
        for state in old.states()
    ]
    new.set_fleet(restarted)
    assert told(new)[0]["resident"] == {}


@pytest.mark.parametrize(
    "broken", [*BROKEN, ["x", 1.0, 1.0], [7, -1.0, 1.0], [7, 1.0, -1.0], [2**70, 1.0, 1.0]], ids=repr
)
def test_rates_and_adapters_of_another_shape_are_left_out(broken: Any) -> None:
    world = World(2)
    piece = msgspec.json.decode(next(pieces(with_adapters())))
    good = [5, 3.0, 1.0]
    piece |= {"prefixes": [broken, good], "adapters": broken, "resident": dict.fromkeys(piece["replicas"], broken)}
    ask(world, memory.TAKE, msgspec.json.encode(piece))
    assert list(rates(world, "prefixes")) == [5]
    assert (told(world)[0]["adapters"], told(world)[0]["resident"]) == ([], {})
    assert world.send().choices


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=200) | st.text(alphabet='{}[]":,m@019.e-', max_size=60).map(str.encode))
def test_whatever_is_handed_over_is_refused_or_taken_and_never_raised(payload: bytes) -> None:
    world = World(1)
    assert ask(world, memory.TAKE, payload).status in (200, 400)
    assert ask(world, memory.TELL, payload).status == 200
    assert world.send().choices


def test_memory_that_is_nested_without_end_is_refused_and_the_router_goes_on() -> None:
    world = World(1)
    for where in ("shared", "guard", "prefixes"):
        nested = b'{"pool": "m", "%s": {"a": %s' % (where.encode(), b"[" * 100_000)
        assert ask(world, memory.TAKE, nested).status == 400
    assert world.send().choices


def test_memory_speaks_of_replicas_by_id_and_else_holds_numbers_and_names_of_adapters() -> None:
    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, dict | list):
            for each in value.values() if isinstance(value, dict) else value:
                yield from leaves(each)
        else:
            yield value

    for row in told(experienced()):
        held = {name: row[name] for name in ("shared", "guard", "replicas", "prefixes")}
        assert {type(value) for value in leaves(held)} <= {int, float, bool, type(None)}


def test_a_replica_that_is_not_found_again_costs_nothing_and_says_nothing() -> None:
    world = World(0)
    for piece in pieces(experienced()):
        ask(world, memory.TAKE, piece)
    world.set_fleet([replica(9)])
    assert told(world)[0]["replicas"]["http://10.0.0.9:8000"]["Scale.factor"] == 1.0
