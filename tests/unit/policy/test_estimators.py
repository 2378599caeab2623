from __future__ import annotations

import random

import pytest
from warmfront.config import CostConfig
from warmfront.policy.estimators import Continuation, Credit, Learned, Regret, Sequences
from warmfront.policy.latency import DecodeModel, PrefillModel, Scale
from warmfront.types import Slot

ALPHA, BETA = 60e-6, 1e-9


def prefill_model(scales: list[float], samples: int) -> PrefillModel:
    rng = random.Random(4)
    model = PrefillModel(CostConfig())
    for _ in scales:
        model.grow()
    for _ in range(samples):
        slot = rng.randrange(len(scales))
        tokens = rng.randrange(700, 30_000)
        pairs = tokens * tokens / 2
        seconds = scales[slot] * (ALPHA * tokens + BETA * pairs) * rng.uniform(0.95, 1.05)
        model.sample(Slot(slot), seconds, tokens, pairs)
    return model


def test_prefill_seconds_are_learned_from_a_prior_that_is_twice_too_dear() -> None:
    model = prefill_model([1.0, 1.0], 300)
    for tokens in (1000, 8000, 30_000):
        truth = ALPHA * tokens + BETA * tokens * tokens / 2
        assert model.seconds(Slot(0), tokens, tokens) == pytest.approx(truth, rel=0.1)


def test_a_slow_replica_is_told_from_a_fast_one_and_drawn_towards_the_pool() -> None:
    model = prefill_model([1.0, 2.5], 600)
    assert 1.8 < model.scale[1] / model.scale[0] <= 2.5


def test_one_measurement_says_little_and_the_like_of_it_much() -> None:
    scale = Scale()
    scale.grow()
    scale.add(Slot(0), 3.0, 1.0)
    once = scale.factor[0]
    for _ in range(9):
        scale.add(Slot(0), 3.0, 1.0)
    assert once < 1.2
    assert scale.factor[0] > 1.7


def test_measurements_that_vary_do_not_tell_a_replica_from_the_pool() -> None:
    scale = Scale()
    scale.grow()
    for seconds in (0.4, 2.5, 0.5, 1.1, 2.0, 0.4):
        scale.add(Slot(0), seconds, 1.0)
    assert scale._measured[0] / scale._expected[0] > 1.05
    assert scale.factor[0] == 1.0


def test_an_engine_thirty_times_slower_than_the_prior_is_learned_too() -> None:
    model = PrefillModel(CostConfig())
    model.grow()
    for _ in range(120):
        model.sample(Slot(0), 2000 * 3.3e-3, 2000, 2e6)
    assert model.seconds(Slot(0), 2000, 2000) == pytest.approx(6.6, rel=0.15)


def test_short_and_absurd_samples_teach_nothing() -> None:
    model = prefill_model([1.0], 0)
    model.sample(Slot(0), 0.01, 100, 5000)
    model.sample(Slot(0), 500.0, 5000, 0)
    model.sample(Slot(0), 0.0, 5000, 0)
    assert model.samples == 0


def test_decode_steps_are_learned_per_replica() -> None:
    rng = random.Random(2)
    model = DecodeModel(CostConfig())
    model.grow()
    for _ in range(400):
        requests, context = rng.randrange(1, 64), rng.randrange(1000, 200_000)
        gap = 0.012 + 1e-4 * requests + 4e-8 * context
        model.sample(Slot(0), gap * rng.uniform(0.97, 1.03), requests, context)
    for requests, context in ((1, 2000), (32, 100_000), (60, 190_000)):
        truth = 0.012 + 1e-4 * requests + 4e-8 * context
        assert model.seconds(Slot(0), requests, context) == pytest.approx(truth, rel=0.05)


def test_one_stalled_gap_does_not_ruin_what_was_learned() -> None:
    model = DecodeModel(CostConfig())
    model.grow()
    for _ in range(200):
        model.sample(Slot(0), 0.02, 8, 20_000)
    model.sample(Slot(0), 30.0, 8, 20_000)
    for _ in range(50):
        model.sample(Slot(0), 0.02, 8, 20_000)
    assert model.seconds(Slot(0), 8, 20_000) == pytest.approx(0.02, rel=0.2)


def test_prefill_is_taken_off_the_gaps_that_it_stretched() -> None:
    learned = Learned(CostConfig())
    learned.grow()
    slot = Slot(0)
    learned.paced(slot, 0.0, gap_s=0.03, requests=4, context_tokens=1000)
    for number in range(1, 200):  # each second 0.22 s of prefill, so that gaps of 39 ms hide steps of 30 ms
        learned.dispatched(slot, number - 0.5, new_tokens=2000, alone=True, usable=False)
        learned.first_token(slot, number - 0.2, new_tokens=2000, prompt_tokens=2000, last=True)
        learned.paced(slot, number, gap_s=0.03 / 0.78, requests=4, context_tokens=1000)
    assert learned.decode.seconds(slot, 4, 1000) == pytest.approx(0.03, rel=0.05)


def test_gaps_measured_during_much_prefill_teach_nothing_about_decoding() -> None:
    learned = Learned(CostConfig())
    learned.grow()
    slot = Slot(0)
    learned.paced(slot, 0.0, gap_s=0.03, requests=4, context_tokens=1000)
    for number in range(20):
        learned.dispatched(slot, number + 0.1, new_tokens=8000, alone=True, usable=True)
        learned.first_token(slot, number + 0.9, new_tokens=8000, prompt_tokens=8000, last=True)
        learned.paced(slot, number + 1.0, gap_s=0.5, requests=4, context_tokens=1000)
    assert learned.decode.samples == 0
    learned.paced(slot, 21.0, gap_s=0.02, requests=4, context_tokens=1000)  # may have begun in a prefill
    assert learned.decode.samples == 0
    learned.paced(slot, 22.0, gap_s=0.02, requests=4, context_tokens=1000)
    assert learned.decode.samples == 1


def test_a_busy_period_is_one_sample() -> None:
    learned = Learned(CostConfig())
    learned.grow()
    slot = Slot(0)
    learned.dispatched(slot, 1.0, new_tokens=2000, alone=True, usable=True)
    learned.dispatched(slot, 1.0, new_tokens=2000, alone=False, usable=True)
    learned.first_token(slot, 1.2, new_tokens=2000, prompt_tokens=2000, last=False)
    assert learned.prefill.samples == 0
    learned.first_token(slot, 1.4, new_tokens=2000, prompt_tokens=2000, last=True)
    assert learned.prefill.samples == 1


def test_a_busy_period_with_a_hidden_first_token_is_no_sample() -> None:
    learned = Learned(CostConfig())
    learned.grow()
    slot = Slot(0)
    learned.dispatched(slot, 1.0, new_tokens=2000, alone=True, usable=True)
    learned.dispatched(slot, 1.0, new_tokens=2000, alone=False, usable=False)
    learned.first_token(slot, 1.2, new_tokens=2000, prompt_tokens=2000, last=False)
    learned.abandoned(slot, last=True)
    assert learned.prefill.samples == 0


@pytest.mark.parametrize(("age_s", "row"), [(-1.0, 16), (0.0, 0), (0.24, 0), (0.25, 1), (0.5, 2), (1.0, 3), (1e9, 15)])
def test_ages_fall_into_buckets_by_their_logarithm(age_s: float, row: int) -> None:
    assert Credit.bucket(age_s) == row


def test_credit_is_lost_and_regained_by_bucket() -> None:
    credit = Credit()
    for _ in range(50):
        credit.learn(4, exact=True, predicted_tokens=2000, reported_tokens=0)
    assert credit.factor[True][4] < 0.1
    assert credit.factor[True][5] == 1.0
    for _ in range(400):
        credit.learn(4, exact=True, predicted_tokens=2000, reported_tokens=2600)
    assert 0.9 < credit.factor[True][4] <= 1.0


def test_conversations_that_end_after_three_turns_are_learned() -> None:
    continuation = Continuation(60.0)
    for _ in range(400):
        for turn in range(3):
            continuation.arrived(turn)
    assert continuation.later[0] == pytest.approx(2.0, abs=0.3)
    assert continuation.later[2] < 0.3


def test_expected_outputs_never_exceed_what_was_asked_for() -> None:
    learned = Learned(CostConfig())
    assert learned.expected_output_tokens(16) == 16
    assert learned.expected_output_tokens(None) == 200


def regret(slots: int = 1) -> Regret:
    made = Regret(CostConfig())
    for _ in range(slots):
        made.grow()
    return made


def test_evicted_blocks_that_nobody_wants_again_make_evictions_cheap() -> None:
    useless, precious = regret(), regret()
    for second in range(40):
        useless.follow(second, [1000 * second], [0])
        precious.follow(second, [1000 * second], [900 * second])
    assert useless.share[0] < 0.1
    assert precious.share[0] > 0.8


def test_no_replica_is_taken_for_more_precious_than_another_by_the_few_documents_it_evicted() -> None:
    made = regret(2)
    for second in range(40):
        made.follow(second, [1000 * second, 1000 * second], [0, 800 * second])
    assert made.share[0] == made.share[1] == pytest.approx(0.4, abs=0.01)
    made.reset(Slot(1))
    for second in range(40, 80):
        made.follow(second, [1000 * second, 0], [0, 0])
    assert made.share[1] == made.share[0] < 0.1


def test_what_was_evicted_long_ago_is_forgotten() -> None:
    made = regret()
    evicted = regretted = 0
    for second in range(200):
        evicted += 1000
        regretted += 1000 if second < 100 else 0
        made.follow(float(second), [evicted], [regretted])
    assert made.share[0] < 0.1


def test_an_overlap_that_knows_no_evictions_is_passed_over() -> None:
    made = regret()
    made.follow(0.0, [50_000], [0])
    made.follow(2.0, [0], [0])
    made.follow(4.0, [50_000], [0])
    assert made.share[0] == CostConfig().regret_prior


def test_a_long_busy_period_is_judged_anew_at_each_cut() -> None:
    learned = Learned(CostConfig())
    learned.grow()
    slot = Slot(0)
    learned.dispatched(slot, 0.0, new_tokens=2000, alone=True, usable=False)
    for number in range(1, 17):
        learned.dispatched(slot, 0.0, new_tokens=2000, alone=False, usable=number > 1)
        learned.first_token(slot, 0.2 * number, new_tokens=2000, prompt_tokens=2000, last=False, usable=True)
    assert learned.prefill.samples == 1


def test_a_gap_that_a_prefill_reaches_into_only_shows_that_steps_are_shorter() -> None:
    learned = Learned(CostConfig())
    learned.grow()
    slot = Slot(0)
    learned.paced(slot, 0.0, gap_s=0.02, requests=4, context_tokens=1000)
    before = learned.decode.seconds(slot, 4, 1000)
    for number in range(1, 20):  # one long prefill, not over yet, stretches every gap
        learned.paced(slot, 0.25 * number, gap_s=0.4, requests=4, context_tokens=1000, progress_s=0.25 * number)
    assert learned.decode.seconds(slot, 4, 1000) == before
    for number in range(20, 120):  # even stretched gaps are shorter than what was expected
        learned.paced(slot, 0.25 * number, gap_s=0.01, requests=4, context_tokens=1000, progress_s=0.25 * number)
    assert learned.decode.seconds(slot, 4, 1000) < 0.0125


def test_a_guess_at_cached_tokens_teaches_only_what_the_answer_confirms() -> None:
    learned = Learned(CostConfig())
    learned.grow()
    slot = Slot(0)
    learned.dispatched(slot, 0.0, new_tokens=700, alone=True, usable=True)
    busy = learned.first_token(slot, 0.6, new_tokens=700, prompt_tokens=10_000, last=True, certain=False)
    assert busy is not None
    assert learned.prefill.samples == 0
    learned.resolved(slot, busy, guessed=700, computed=10_000, prompt_tokens=10_000)
    assert learned.prefill.samples == 1
    assert learned.prefill.alpha * learned.prefill.scale[slot] < CostConfig().prefill_prior_s
    assert busy.tokens == 10_000
    assert busy.pairs == pytest.approx(10_000 * 5000)


def test_what_was_known_for_certain_teaches_at_once() -> None:
    learned = Learned(CostConfig())
    learned.grow()
    slot = Slot(0)
    learned.dispatched(slot, 0.0, new_tokens=2000, alone=True, usable=True)
    assert learned.first_token(slot, 0.2, new_tokens=2000, prompt_tokens=9000, last=True) is None
    assert learned.prefill.samples == 1


def test_decoding_in_the_same_steps_is_not_charged_to_the_tokens() -> None:
    model = prefill_model([1.0], 0)
    for _ in range(200):
        model.sample(Slot(0), 2000 * ALPHA + 0.1, 2000, 2e6, decode_s=0.1)
        model.sample(Slot(0), 700 * ALPHA + 0.3, 700, 2e5, decode_s=0.3)
    assert model.seconds(Slot(0), 2000, 2000) == pytest.approx(2000 * ALPHA, rel=0.1)


def test_a_replica_that_is_never_without_prefill_still_learns_its_steps() -> None:
    rng = random.Random(3)
    learned = Learned(CostConfig())
    learned.grow()
    slot = Slot(0)
    for number in range(1, 1200):  # 40 % of each interval is prefill, and one is always going on
        learned.dispatched(slot, 0.25 * number, new_tokens=900, alone=True, usable=False)
        learned.first_token(slot, 0.25 * number + 0.1, new_tokens=900, prompt_tokens=900, last=False)
        context = rng.randrange(100_000, 600_000)
        gap_s = (0.012 + 4e-8 * context) / (1.0 - 900 * CostConfig().prefill_prior_s / 0.25)
        learned.paced(slot, 0.25 * number + 0.2, gap_s=gap_s, requests=40, context_tokens=context, progress_s=0.05)
    assert learned.decode.seconds(slot, 40, 500_000) == pytest.approx(0.012 + 4e-8 * 500_000, rel=0.1)


def test_a_replica_that_decodes_slowly_is_told_from_the_others() -> None:
    rng = random.Random(6)
    model = DecodeModel(CostConfig())
    for _ in range(3):
        model.grow()
    for number in range(3000):
        slot, context = Slot(number % 3), rng.randrange(1000, 200_000)
        model.sample(slot, (0.012 + 4e-8 * context) * (2.0 if slot == 2 else 1.0), 8, context)
    for slot, factor in enumerate((1.0, 1.0, 2.0)):
        assert model.seconds(Slot(slot), 8, 100_000) == pytest.approx(factor * 0.016, rel=0.05)


def test_an_engine_that_decodes_thirty_times_slower_than_the_prior_is_learned_too() -> None:
    model = DecodeModel(CostConfig())
    model.grow()
    for _ in range(60):
        model.sample(Slot(0), 0.75, 4, 8000)
    assert model.seconds(Slot(0), 4, 8000) == pytest.approx(0.75, rel=0.1)


def test_what_load_adds_to_a_step_is_learned_from_the_first_minute() -> None:
    model = DecodeModel(CostConfig())
    model.grow()
    for number in range(60):  # a fleet that fills up
        context = 1000 + 1000 * number
        model.sample(Slot(0), 0.014 + 5e-8 * context, number, context)
    added = model.seconds(Slot(0), 120, 120_000) - model.seconds(Slot(0), 60, 60_000)
    assert added == pytest.approx(5e-8 * 60_000, rel=0.4)


def test_expected_steps_stay_near_the_measured_ones_where_requests_and_tokens_come_and_go_together() -> None:
    rng = random.Random(7)
    model = DecodeModel(CostConfig())
    model.grow()
    worst = 0.0
    for number in range(3000):  # fills up, stays full, and drains
        phase = number % 500
        requests = min(phase, 150) if phase < 300 else max(1, 150 * (500 - phase) // 200)
        context = requests * (7500.0 + rng.uniform(-200.0, 200.0))
        step_s = 0.0145 + 4.7e-8 * 7500.0 * min(requests, 100)  # memory holds no more
        if number > 500 and requests > 5:
            worst = max(worst, model.seconds(Slot(0), requests, context) / step_s)
        is_resumed = phase > 200 and rng.random() < 0.1  # a pre-empted answer goes on: one gap of many seconds
        model.sample(Slot(0), step_s * rng.uniform(0.99, 1.01) * (4.0 if is_resumed else 1.0), requests, context)
    assert worst < 2.0


def sequences() -> Sequences:
    made = Sequences()
    made.grow()
    return made


def test_an_engine_that_runs_no_more_while_others_wait_has_reached_its_limit() -> None:
    made = sequences()
    for running in (40, 256, 250, 256):
        assert made.limit == [None]
        made.seen(Slot(0), running=running, waiting=30, kv_usage=0.4)
    assert made.limit == [256]


def test_a_limit_is_forgotten_when_the_engine_runs_more() -> None:
    made = sequences()
    for _ in range(4):
        made.seen(Slot(0), running=64, waiting=30, kv_usage=0.4)
    assert made.limit == [64]
    made.seen(Slot(0), running=90, waiting=30, kv_usage=0.4)
    assert made.limit == [None]


def test_a_limit_holds_for_the_pool_except_where_more_were_seen_to_run() -> None:
    made = sequences()
    made.grow()
    made.grow()
    made.seen(Slot(2), running=300, waiting=0, kv_usage=0.4)
    for _ in range(4):
        made.seen(Slot(0), running=256, waiting=30, kv_usage=0.4)
    assert made.limit == [256, 256, None]


@pytest.mark.parametrize(
    ("running", "waiting", "kv_usage"),
    [((5, 9, 4, 9, 6, 9), 3, 0.4), ((64,) * 6, 0, 0.4), ((64,) * 6, 3, 0.97), ((0,) * 6, 3, 0.4)],
    ids=["a long prefill", "nobody waits", "no memory", "none has begun"],
)
def test_other_reasons_to_wait_are_no_limit(running: tuple[int, ...], waiting: int, kv_usage: float) -> None:
    made = sequences()
    for count in running:
        made.seen(Slot(0), running=count, waiting=waiting, kv_usage=kv_usage)
    assert made.limit == [None]


def test_beyond_the_limit_a_request_waits_for_the_ends_of_those_before_it() -> None:
    learned = Learned(CostConfig())
    learned.grow()
    assert learned.admission_s(Slot(0), 300) == 0.0
    for _ in range(4):
        learned.sequences.seen(Slot(0), running=256, waiting=30, kv_usage=0.4)
    learned.finished(Slot(0), output_tokens=None, residence_s=learned.residence_s[0])
    assert learned.admission_s(Slot(0), 255) == 0.0
    assert learned.admission_s(Slot(0), 255 + 128) == pytest.approx(0.5 * learned.residence_s[0])


def test_the_way_to_a_replica_is_no_part_of_its_prefill() -> None:
    learned, near = Learned(CostConfig()), Learned(CostConfig())
    for each, net_s in ((learned, 0.5), (near, 0.0)):
        each.grow()
        for number in range(30):
            each.dispatched(Slot(0), 10.0 * number, new_tokens=4000, alone=True, usable=True, net_s=net_s)
            each.first_token(Slot(0), 10.0 * number + 0.4 + net_s, new_tokens=4000, prompt_tokens=4000, last=True)
    assert learned.prefill.samples == 30
    assert learned.prefill.alpha == pytest.approx(near.prefill.alpha)
