from __future__ import annotations

import logging

import pytest
from support.routing import World, request
from warmfront.router.accuracy import Accuracy
from warmfront.types import Usage


def answers(accuracy: Accuracy, count: int, *, predicted: int, reported: int | None, basis: str = "tokens") -> None:
    for number in range(count):
        accuracy.add(request(number, basis=basis), predicted, Usage(1600, reported, 10))


def test_predictions_that_stay_wrong_are_said_once_and_their_end_once(caplog: pytest.LogCaptureFixture) -> None:
    accuracy = Accuracy("http://a")
    with caplog.at_level(logging.INFO):
        answers(accuracy, 19, predicted=1000, reported=0)
        assert not accuracy.is_mismatched
        answers(accuracy, 40, predicted=1000, reported=0)
        assert accuracy.is_mismatched
        answers(accuracy, 256, predicted=1000, reported=1000)
    assert not accuracy.is_mismatched
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING, logging.INFO]
    assert "chat template" in caplog.records[0].getMessage()


def test_small_errors_are_no_mismatch() -> None:
    accuracy = Accuracy("http://a")
    answers(accuracy, 50, predicted=1000, reported=984)
    assert not accuracy.is_mismatched
    assert accuracy.mean_error_tokens() == accuracy.p99_error_tokens() == 16


def test_prompts_known_as_bytes_only_do_not_accuse_a_replica() -> None:
    accuracy = Accuracy("http://a")
    answers(accuracy, 50, predicted=1000, reported=0, basis="bytes")
    assert not accuracy.is_mismatched
    assert accuracy.answers == 50


def test_an_engine_that_does_not_report_is_told_how_to() -> None:
    accuracy = Accuracy("http://a")
    answers(accuracy, 3, predicted=1000, reported=None)
    assert accuracy.unreported == 3
    assert "--enable-prompt-tokens-details" in (accuracy.note() or "")
    answers(accuracy, 1, predicted=1000, reported=1000)
    assert accuracy.note() is None


def test_the_fleet_report_holds_the_error_of_each_replica() -> None:
    world = World(1)
    for _ in range(4):
        world.serve(prefix_key=3)
    report = world.ask("fleet")["pools"][0]["replicas"][0]["accuracy"]
    assert report["answers"] == report["exact_matches"] == 4
    assert report["predicted_cached_tokens"] == report["reported_cached_tokens"] == 3 * 1584
    assert report["mismatch"] is False


@pytest.mark.parametrize(("reports", "samples"), [(True, 12), (False, 0)])
def test_where_answers_do_not_tell_what_was_cached_warm_prompts_say_nothing_of_the_engine(
    reports: bool, samples: int
) -> None:
    """Events promise 15,000 of 16,000 tokens, and the engine takes as long as if it had computed them all."""
    world = World(1)
    learned = world.router._pools["m"].fleet.learned
    first = world.send(prefix_key=1)
    world.finish(first, cached_tokens=0 if reports else None)
    world.index.held[(0, 77)] = 15_008
    for _ in range(12):
        dispatch = world.send(prefix_key=77, prompt_tokens=16_000)
        world.index.held[(0, 77)] = 15_008
        world.now_s += 0.5
        world.first_token(dispatch)
        world.finish(dispatch, cached_tokens=15_008 if reports else None)
        world.now_s += 10.0
    assert learned.prefill.samples == samples
    cold = world.send(prefix_key=5, prompt_tokens=16_000)
    world.now_s += 1.0
    world.first_token(cold)
    assert learned.prefill.samples == samples + 1
