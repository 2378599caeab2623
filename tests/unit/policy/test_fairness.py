"""Who uses how much, and what that makes of the price of a flow's work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routing import EAGER, World
from warmfront.config import CostConfig, FlowConfig, PolicyConfig
from warmfront.policy.fairness import FLOWS_MAX, REBASE_AFTER_S, WINDOW_S, Shares


def used(**tokens: float) -> Shares:
    made = Shares()
    for flow, amount in tokens.items():
        made.add(flow, amount, 0.0)
    return made


def test_a_flow_alone_takes_nothing_from_anybody() -> None:
    assert used(only=1e6).overdraft("only") == 0.0
    assert used(only=1e6).overdraft("new") == 0.0
    assert Shares().overdraft("new") == 0.0


def test_the_overdraft_is_what_a_flow_uses_above_its_share_of_what_it_could() -> None:
    shares = used(flood=8000.0, first=1000.0, second=1000.0)
    assert shares.overdraft("flood") == pytest.approx((0.8 - 1 / 3) / (1 - 1 / 3))
    assert shares.overdraft("first") == 0.0
    assert used(flood=8000.0, first=1e-9).overdraft("flood") == pytest.approx(1.0)


def test_a_heavier_flow_may_use_more() -> None:
    shares = used(paying=6000.0, free=4000.0)
    assert shares.overdraft("paying") > 0.0
    shares.reweigh({"paying": 3.0})
    assert shares.overdraft("paying") == 0.0
    assert shares.overdraft("free") == pytest.approx((0.4 - 0.25) / 0.75)


def test_use_is_forgotten_in_minutes_and_a_flow_that_is_gone_counts_no_more() -> None:
    shares = used(flood=100_000.0)
    for second in range(1, 400):
        shares.add("calm", 100.0, float(second))
        shares.add("other", 100.0, float(second))
    assert shares.overdraft("flood") == 0.0
    for second in range(400, 1200):
        shares.add("calm", 100.0, float(second))
    assert shares.overdraft("calm") == 0.0, "the others have left, and it is alone"


def test_counts_stay_right_for_days_and_in_bounds() -> None:
    shares = Shares()
    for step in range(3000):
        now_s = step * REBASE_AFTER_S / 5
        shares.add("flood", 3000.0, now_s)
        shares.add("calm", 1000.0, now_s)
    assert shares.overdraft("flood") == pytest.approx(0.5)
    for number in range(2 * FLOWS_MAX):
        shares.add(f"flow {number}", 500.0, now_s)
    assert len(shares._used) <= FLOWS_MAX
    assert shares._total == pytest.approx(sum(shares._used.values()))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    dispatches=st.lists(
        st.tuples(st.sampled_from("abcd"), st.floats(0, 1e6), st.floats(0, 3 * WINDOW_S)), min_size=1, max_size=60
    )
)
def test_overdrafts_are_shares_and_not_all_flows_have_one(dispatches: list[tuple[str, float, float]]) -> None:
    shares, now_s = Shares(), 0.0
    for flow, tokens, later_s in dispatches:
        now_s += later_s
        shares.add(flow, tokens, now_s)
    overdrafts = [shares.overdraft(flow) for flow in "abcd"]
    assert all(0.0 <= overdraft <= 1.0 + 1e-9 for overdraft in overdrafts)
    assert min(overdrafts) <= 1e-9


def busy_world(**config: float) -> World:
    """A fleet that decodes, mostly for one flow."""
    world = World(3, policy=PolicyConfig(cost=CostConfig(**config)))  # type: ignore[arg-type]
    for number in range(60):
        world.now_s += 0.05
        world.first_token(world.send(flow="calm" if number % 10 == 0 else "flood", prompt_tokens=800))
    return world


def prices(world: World, flow: str) -> list[float]:
    rows = world.costs(world.new(flow=flow)).values()
    return [next(each["value"] for each in row["factors"] if each["symbol"] == "X") for row in rows]


def test_work_of_a_greedy_flow_is_dearer_by_what_it_costs_others() -> None:
    world = busy_world(fairness_weight=2.0)
    overdraft = world.router._pools["m"].fleet.shares.overdraft("flood")
    assert overdraft == pytest.approx(0.8, rel=0.01)
    calm, greedy = prices(world, "calm"), prices(world, "flood")
    assert all(price > 1.0 for price in calm)
    for own, dearer in zip(calm, greedy, strict=True):
        assert dearer - 1.0 == pytest.approx((1.0 + 2.0 * overdraft) * (own - 1.0))


def test_a_greedy_flow_stays_longer_where_its_prefix_is() -> None:
    where = []
    for flow in ("calm", "flood"):
        world = busy_world()
        world.index.held[(0, 77)] = 1600
        world.load(0, 2, prompt_tokens=3200)
        where.append(world.slot(flow=flow, prefix_key=77))
    assert where[0] != 0
    assert where[1] == 0


def test_without_weight_flows_do_not_matter() -> None:
    world = busy_world(fairness_weight=0.0)
    assert prices(world, "flood") == prices(world, "calm")


def test_weights_of_flow_control_are_those_of_fair_shares() -> None:
    world = World(2, flow=FlowConfig(late_binding=EAGER.late_binding, weights={"flood": 9.0}))
    for number in range(20):
        world.send(flow="calm" if number % 10 == 0 else "flood")
    assert world.router._pools["m"].fleet.shares.overdraft("flood") == 0.0
    assert world.router._pools["m"].fleet.shares.overdraft("calm") == pytest.approx(0.0, abs=0.01)
