"""Logs of requests become workloads: sharing and lengths survive, text does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from warmfront.errors import ConfigError
from warmfront.lab.traces.access_log import Imported, Options, read
from warmfront.lab.traces.summary import summarise

SYSTEM = {"role": "system", "content": "You are a patient assistant. " * 20}
FIRST = {"role": "user", "content": "What is the capital of Assyria? " * 5}
ANSWER = {"role": "assistant", "content": "Assur, then Nineveh."}
SECOND = {"role": "user", "content": "And of Babylonia?"}


def imported(path: Path, *lines: Any, salt: bytes = b"salt", **options: Any) -> Imported:
    path.write_bytes(b"\n".join(msgspec.json.encode(line) for line in lines))
    return read(path, Options(salt=salt, block_tokens=8, **options))


def chat(*messages: Any, time: float | str = 0.0, **others: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": list(messages), **others.pop("body", {})}
    return {"time": time, "body": body, **others}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def test_a_second_turn_begins_with_the_blocks_of_the_first(log: Path) -> None:
    found = imported(log, chat(SYSTEM, FIRST), chat(SYSTEM, FIRST, ANSWER, SECOND, time=9.0))
    first, second = (job.steps[0] for job in found.jobs)
    full = len(first.prompt) - 1
    assert second.prompt[:full] == first.prompt[:full]
    assert (first.turn, second.turn) == (0, 1)
    assert [job.at_s for job in found.jobs] == [0.0, 9.0]
    assert summarise(found.jobs, 8).reusable_share > 0.4


def test_a_difference_at_the_beginning_shares_nothing(log: Path) -> None:
    other = {**SYSTEM, "content": "x" + str(SYSTEM["content"])}
    found = imported(log, chat(SYSTEM, FIRST), chat(other, FIRST))
    assert summarise(found.jobs, 8).reusable_share == 0


def test_the_same_text_further_on_is_not_recognised(log: Path) -> None:
    text = "abcdefgh" * 4 * 8
    (job,) = imported(log, {"time": 0, "body": {"prompt": text}}).jobs
    contents = [content for content, _ in job.steps[0].prompt]
    assert len(set(contents)) == len(contents) == 8


def test_another_salt_gives_other_hashes(log: Path) -> None:
    one, two = (imported(log, chat(SYSTEM), salt=salt).jobs[0].steps[0].prompt for salt in (b"a", b"b"))
    assert not {content for content, _ in one} & {content for content, _ in two}
    assert imported(log, chat(SYSTEM), salt=b"a").jobs[0].steps[0].prompt == one


def test_lengths_count_four_bytes_a_token(log: Path) -> None:
    (job,) = imported(log, {"time": 0, "body": {"prompt": "x" * 41}}).jobs
    assert [tokens for _, tokens in job.steps[0].prompt] == [8, 3]


def test_token_ids_are_tokens(log: Path) -> None:
    found = imported(log, {"time": 0, "body": {"prompt": [[1] * 10, [1] * 8 + [2]]}})
    one, two = (job.steps[0].prompt for job in found.jobs)
    assert [tokens for _, tokens in one] == [8, 2]
    assert one[0] == two[0]


def test_a_tokenizer_is_used_where_it_can_and_otherwise_counted(log: Path) -> None:
    def tokenize(path: str, body: bytes) -> list[list[int]]:
        if path != "/v1/chat/completions":
            raise ValueError("images")
        return [[7] * 20]

    found = imported(log, chat(FIRST), {"time": 1, "body": {"prompt": "x" * 8}}, tokenize=tokenize)
    assert [sum(tokens for _, tokens in job.steps[0].prompt) for job in found.jobs] == [20, 2]
    assert found.notes["requests cut into bytes instead of tokens (images)"] == 1


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        (chat(FIRST, usage={"completion_tokens": 5}, answer="x" * 400), 5),
        (chat(FIRST, response={"id": "r", "usage": {"prompt_tokens": 1, "completion_tokens": 6}}), 6),
        (chat(FIRST, answer="x" * 41), 11),
        (chat(FIRST, body={"max_tokens": 30}), 30),
        (chat(FIRST, body={"max_completion_tokens": 31, "max_tokens": 30}), 31),
        (chat(FIRST), 256),
    ],
)
def test_an_answer_is_as_long_as_the_best_source_says(line: Any, tokens: int, log: Path) -> None:
    (job,) = imported(log, line).jobs
    assert job.steps[0].output_tokens == tokens


def test_lines_without_a_prompt_are_left_out_and_counted(log: Path) -> None:
    found = imported(log, {"time": 0, "body": {"input": "embed me"}}, chat(FIRST))
    assert len(found.jobs) == 1
    assert found.notes["lines without a prompt, left out"] == 1


def test_lines_may_come_in_the_order_of_their_answers_and_in_either_form_of_time(log: Path) -> None:
    found = imported(log, chat(FIRST, time="2026-01-02T03:04:07Z"), chat(SYSTEM, time=1767323045.5))
    assert [job.at_s for job in found.jobs] == [0.0, 1.5]


def test_a_body_may_be_a_string_that_holds_one(log: Path) -> None:
    line = chat(SYSTEM, FIRST)
    written = {**line, "body": msgspec.json.encode(line["body"]).decode()}
    assert imported(log, written).jobs == imported(log, line).jobs


def test_requests_of_one_user_are_one_session_without_the_name(log: Path) -> None:
    lines = [chat(FIRST, body={"user": name}) for name in ("ann", "ann", "bob")]
    one, two, three = (job.steps[0].session for job in imported(log, *lines).jobs)
    assert one == two != three


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Input data was truncated"),
        ('{"body": {}}', "Object missing required field `time`"),
        ('{"time": "yesterday", "body": {}}', "time: Invalid isoformat string"),
        ('{"time": 1, "body": [1]}', "body: expected an object, got list"),
        ('{"time": 1, "body": {"messages": "secret"}}', "body.messages: expected a list of objects"),
        ('{"time": 1, "body": {"prompt": {"secret": 1}}}', "body.prompt: expected text, token ids, or a list of these"),
        ('{"time": 1, "body": {"prompt": [-1]}}', "body.prompt: "),
        ('{"time": 1, "body": {}, "usage": {"completion_tokens": "9"}}', "$.usage.completion_tokens"),
    ],
)
def test_a_bad_line_is_named_without_its_text(line: str, message: str, log: Path) -> None:
    log.write_text(msgspec.json.encode(chat(FIRST)).decode() + "\n\n" + line, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read(log, Options(salt=b"s"))
    assert str(caught.value).startswith(f"{log}:3: ")
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)
