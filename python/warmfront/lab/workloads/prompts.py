"""Single prompts: nothing shared, one prefix shared by all, or many prefixes shared by some.

Each arrival is one request. What differs is which beginning a prompt has, and so how much of it a cache can save.
"""

from __future__ import annotations

import itertools
from bisect import bisect
from collections.abc import Callable, Iterator
from functools import lru_cache
from random import Random
from typing import Annotated

from msgspec import Meta, Struct

from warmfront.lab.jobs import Job, Step
from warmfront.lab.model import Segment
from warmfront.lab.workloads.amounts import Amount, Lognormal, Natural, Positive, draw_count, most
from warmfront.lab.workloads.draw import Draw
from warmfront.lab.workloads.registry import kind

Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Unique(Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts that have nothing in common: only load matters."""

    prompt: Amount = Lognormal(mean=3000, cv=1.2, min=50, max=30_000)
    output: Amount = Lognormal(mean=250, cv=0.8, min=5, max=2000)


@kind("unique", Unique)
def unique(parameters: Unique, draw: Draw, arrivals: Iterator[float]) -> Iterator[Job]:
    """Yield one fresh prompt for each arrival."""
    random = draw.stream("lengths")
    for at_s in arrivals:
        prompt = ((draw.content(), draw_count(parameters.prompt, random)),)
        yield single(at_s, prompt, parameters.output, random)


class HotPrefix(Struct, frozen=True, forbid_unknown_fields=True):
    """One beginning shared by every prompt; a short one with long outputs is ordinary traffic under a system prompt."""

    prefix: Count = 8000
    own: Amount = 500
    output: Amount = Lognormal(mean=200, cv=0.6, min=10, max=1000)


@kind("hot_prefix", HotPrefix)
def hot_prefix(parameters: HotPrefix, draw: Draw, arrivals: Iterator[float]) -> Iterator[Job]:
    """Yield the prefix with a fresh question."""
    random = draw.stream("lengths")
    prefix = (draw.content(), parameters.prefix)
    for at_s in arrivals:
        own = (draw.content(), draw_count(parameters.own, random))
        yield single(at_s, (prefix, own), parameters.output, random)


class SharedPrefixes(Struct, frozen=True, forbid_unknown_fields=True):
    """The shared-prefix benchmark of llm-d: groups with a system prompt each, and questions.

    Source: the llm-d guide on precise prefix cache aware routing: 150 groups of 5 prompts, 6,000 shared and 1,200 own
    tokens in, 1,000 out.
    """

    groups: Count = 150
    prompts: Annotated[int, Meta(ge=0)] = 5
    """Prompts of a group, which come again and again in ever new order. 0: every question is new."""
    prefix: Count = 6000
    question: Amount = 1200
    output: Amount = 1000


@kind("shared_prefixes", SharedPrefixes)
def shared_prefixes(parameters: SharedPrefixes, draw: Draw, arrivals: Iterator[float]) -> Iterator[Job]:
    """Yield all prompts in random order, over and over; or random groups with fresh questions."""
    random = draw.stream("lengths")
    prefixes = [(prefix, parameters.prefix) for prefix in draw.contents(parameters.groups)]
    prompts = _cycled(parameters, prefixes, draw) if parameters.prompts else _asked(parameters, prefixes, draw)
    for at_s, prompt in zip(arrivals, prompts, strict=False):
        yield single(at_s, prompt, parameters.output, random)


def _cycled(parameters: SharedPrefixes, prefixes: list[Segment], draw: Draw) -> Iterator[tuple[Segment, ...]]:
    random = draw.stream("prompts")
    prompts = [
        (prefix, (draw.content(), draw_count(parameters.question, random)))
        for prefix, _ in itertools.product(prefixes, range(parameters.prompts))
    ]
    while True:
        random.shuffle(prompts)
        yield from prompts


def _asked(parameters: SharedPrefixes, prefixes: list[Segment], draw: Draw) -> Iterator[tuple[Segment, ...]]:
    random = draw.stream("prompts")
    while True:
        yield random.choice(prefixes), (draw.content(), draw_count(parameters.question, random))


class ZipfKeys(Struct, frozen=True, forbid_unknown_fields=True):
    """Very many keys of falling popularity, each with a context, as in the evaluation of CacheRoute.

    A prompt is a template shared by all, the key's context, what was retrieved for it, and the user's turn. Popularity
    is `(rank + offset) ** -exponent`. Over 128,824 keys 0.86 and 45 give the published shape: the first key has less
    than 0.3 % of the requests, the top 4 % have about 47 %, and the Gini coefficient of 250,000 of them is 0.75.
    """

    keys: Count = 128_824
    exponent: Positive = 0.86
    offset: Natural = 45.0
    template: Annotated[int, Meta(ge=0)] = 480
    context: Count = 180
    retrieval: Annotated[int, Meta(ge=0)] = 420
    retrieval_changes: Share = 0.67
    """How often the same key brings other retrieved text, which ends the shared prefix."""
    own: Amount = 120
    output: Amount = Lognormal(mean=150, cv=0.8, min=10, max=800)


@kind("zipf_keys", ZipfKeys)
def zipf_keys(parameters: ZipfKeys, draw: Draw, arrivals: Iterator[float]) -> Iterator[Job]:
    """Yield a prompt of a key drawn by popularity."""
    random = draw.stream("keys")
    template = draw.content()
    contexts = draw.contents(parameters.keys)
    rank = by_rank(parameters.keys, parameters.exponent, parameters.offset)
    retrieved: dict[int, int] = {}
    for at_s in arrivals:
        key = rank(random)
        if key not in retrieved or random.random() < parameters.retrieval_changes:
            retrieved[key] = draw.content()
        prompt = (
            (template, parameters.template),
            (contexts[key], parameters.context),
            (retrieved[key], parameters.retrieval),
            (draw.content(), draw_count(parameters.own, random)),
        )
        yield single(at_s, tuple(segment for segment in prompt if segment[1]), parameters.output, random)


class Documents(Struct, frozen=True, forbid_unknown_fields=True):
    """Retrieval: questions about documents of falling popularity. The corpus may be larger than all caches."""

    documents: Count = 800
    exponent: Natural = 0.9
    length: Amount = Lognormal(mean=10_000, cv=0.5, min=2000, max=40_000)
    instructions: Annotated[int, Meta(ge=0)] = 0
    """Tokens before the documents that all prompts share."""
    retrieved: Count = 1
    """Documents in one prompt, in the order of their retrieval: only what begins alike is shared."""
    question: Amount = 150
    output: Amount = Lognormal(mean=150, cv=0.6, min=10, max=800)


@kind("documents", Documents)
def documents(parameters: Documents, draw: Draw, arrivals: Iterator[float]) -> Iterator[Job]:
    """Yield a question about documents drawn by popularity."""
    random = draw.stream("documents")
    corpus = _corpus(parameters, draw, draw.stream("corpus"))
    rank = by_rank(len(corpus), parameters.exponent)
    head = ((draw.content(), parameters.instructions),) if parameters.instructions else ()
    for at_s in arrivals:
        yield _question(at_s, parameters, head, _retrieve(corpus, parameters.retrieved, rank, random), draw, random)


class Churn(Documents, frozen=True, forbid_unknown_fields=True):
    """Documents whose popularity does not last: all are replaced by new ones every so often."""

    documents: Count = 100
    exponent: Natural = 1.1
    length: Amount = 8000
    period_s: Positive = 60.0
    """How long a set of documents lives."""


@kind("churn", Churn, clock="open")
def churn(parameters: Churn, draw: Draw, arrivals: Iterator[float]) -> Iterator[Job]:
    """Yield a question about the documents of the day."""
    random, lengths = draw.stream("documents"), draw.stream("corpus")
    rank = by_rank(parameters.documents, parameters.exponent)
    head = ((draw.content(), parameters.instructions),) if parameters.instructions else ()
    corpus, period = _corpus(parameters, draw, lengths), 0
    for at_s in arrivals:
        if at_s >= (period + 1) * parameters.period_s:
            corpus, period = _corpus(parameters, draw, lengths), int(at_s // parameters.period_s)
        yield _question(at_s, parameters, head, _retrieve(corpus, parameters.retrieved, rank, random), draw, random)


def _corpus(parameters: Documents, draw: Draw, random: Random) -> list[Segment]:
    """Return documents, the most popular first."""
    return [(content, draw_count(parameters.length, random)) for content in draw.contents(parameters.documents)]


def _retrieve(corpus: list[Segment], number: int, rank: Callable[[Random], int], random: Random) -> tuple[Segment, ...]:
    found: dict[int, Segment] = {}
    while len(found) < min(number, len(corpus)):
        document = rank(random)
        found.setdefault(document, corpus[document])
    return tuple(found.values())


def _question(
    at_s: float,
    parameters: Documents,
    head: tuple[Segment, ...],
    found: tuple[Segment, ...],
    draw: Draw,
    random: Random,
) -> Job:
    own = (draw.content(), draw_count(parameters.question, random))
    return single(at_s, (*head, *found, own), parameters.output, random)


class Adapters(Struct, frozen=True, forbid_unknown_fields=True):
    """LoRA adapters of falling popularity, each with a system prompt.

    They are named `adapter-0`, `adapter-1`, … in the order of popularity. KV of one adapter is of no use to
    another, even for the same text, and not every replica has every adapter.
    """

    adapters: Count = 8
    exponent: Natural = 1.0
    prefix: Count = 2000
    own: Amount = Lognormal(mean=600, cv=1.0, min=20, max=6000)
    output: Amount = Lognormal(mean=200, cv=0.8, min=10, max=1500)


@kind("adapters", Adapters)
def adapters(parameters: Adapters, draw: Draw, arrivals: Iterator[float]) -> Iterator[Job]:
    """Yield a prompt to an adapter drawn by popularity."""
    random = draw.stream("adapters")
    prefixes = draw.contents(parameters.adapters)
    rank = by_rank(parameters.adapters, parameters.exponent)
    for at_s in arrivals:
        adapter = rank(random)
        prompt = ((prefixes[adapter], parameters.prefix), (draw.content(), draw_count(parameters.own, random)))
        yield single(at_s, prompt, parameters.output, random, adapter=f"adapter-{adapter}")


def single(
    at_s: float, prompt: tuple[Segment, ...], output: Amount, random: Random, *, adapter: str | None = None
) -> Job:
    """Return a job of one request; the client's limit is what cuts the longest answers."""
    step = Step(
        prompt=prompt, output_tokens=draw_count(output, random), output_tokens_max=most(output), adapter=adapter
    )
    return Job(at_s, (step,))


def by_rank(number: int, exponent: float, offset: float = 0.0) -> Callable[[Random], int]:
    """Return a function that draws ranks from 0, rank r with weight `(r + 1 + offset) ** -exponent`."""
    bounds = _cumulated(number, exponent, offset)
    return lambda random: bisect(bounds, random.random() * bounds[-1], 0, number - 1)


@lru_cache(maxsize=16)
def _cumulated(number: int, exponent: float, offset: float) -> tuple[float, ...]:
    return tuple(itertools.accumulate((rank + offset) ** -exponent for rank in range(1, number + 1)))
