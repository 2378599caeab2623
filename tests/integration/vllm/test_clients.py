"""The official clients work through the router as they do with an engine."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest

from .engine import MODEL
from .router import Router
from .shapes import prose

TIMEOUT_S = 120.0


@pytest.fixture
def client(router: Router) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_client(router: Router) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=router.url, api_key="none", timeout=TIMEOUT_S, max_retries=0) as client:
        yield client


def test_openai_client_chats(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": prose("client")}], max_tokens=5
    )
    assert made.usage is not None
    assert made.usage.completion_tokens <= 5
    assert made.usage.prompt_tokens_details is not None


def test_openai_client_streams_to_the_last_chunk(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prose("client stream")}],
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert chunks[-1].usage is not None
    assert any(chunk.choices and chunk.choices[0].finish_reason for chunk in chunks)


def test_openai_client_completes_token_ids(client: openai.OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt=list(range(1000, 1300)), max_tokens=3)
    assert made.usage is not None
    assert made.usage.prompt_tokens == 300


def test_openai_client_uses_the_responses_api(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=prose("responses client"), max_output_tokens=4)
    assert made.usage is not None
    assert made.usage.output_tokens <= 4


def test_openai_client_lists_models(client: openai.OpenAI) -> None:
    assert MODEL in {model.id for model in client.models.list()}


def test_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "Hello."}])
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[])


def test_anthropic_client_sends_messages(anthropic_client: anthropic.Anthropic) -> None:
    made = anthropic_client.messages.create(
        model=MODEL, max_tokens=5, messages=[{"role": "user", "content": prose("messages client")}]
    )
    assert made.usage.output_tokens <= 5


def test_anthropic_client_streams(anthropic_client: anthropic.Anthropic) -> None:
    with anthropic_client.messages.stream(
        model=MODEL, max_tokens=8, messages=[{"role": "user", "content": prose("messages client stream")}]
    ) as stream:
        kinds = {event.type for event in stream}
    assert {"message_start", "message_stop"} <= kinds
