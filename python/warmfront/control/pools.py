"""From what is known about servers to the fleet that the core is told. Pure: rules are tested without a network.

A pool is all servers whose first base model name is the same. Aliases and adapters that only some of them serve are
routed to those: the others say so in `lacks`. A name belongs to one pool, whoever else serves it. Whatever does not fit
together is said in words, in the notes of the replicas and in `degraded`; nothing is dropped silently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from warmfront.config import FleetConfig, ModelConfig
from warmfront.control.facts import ModelCard, ServerFacts
from warmfront.control.security import tls_options
from warmfront.control.verify import TokenCheck
from warmfront.types import EngineLoad, EventSource, FleetUpdate, PoolUpdate, ReplicaUpdate, TemplateOptions


def fleet_update(
    servers: Sequence[ServerFacts],
    fleet: FleetConfig,
    *,
    version: int,
    now_s: float,
    is_tokenizer: Callable[[str], bool],
    checks: Mapping[str, TokenCheck],
    degraded: Iterable[str] = (),
) -> FleetUpdate:
    """Build the whole fleet.

    Args:
        servers: Facts, in the order of discovery; it decides the order of pools and replicas.
        fleet: Tokenizers and models as configured.
        version: Number of this update.
        now_s: For the age of load figures.
        is_tokenizer: Whether a path can be read as tokenizer on this machine.
        checks: Result of the comparison of token ids with each server, by its URL.
        degraded: Further problems to report.
    """
    members: dict[str, list[ServerFacts]] = {}
    for facts in servers:
        if facts.cards:
            members.setdefault(_base_name(facts), []).append(facts)
    claims, owners = _contested(servers), _owners(members)
    unknown = [f"{facts.server.url}: {facts.reason}" for facts in servers if not facts.cards]
    pools, problems = [], list(degraded) + unknown + _shared_names(members, owners)
    for name, facts_of_pool in members.items():
        conflicts = _conflicts(facts_of_pool)
        problems += [f"pool {name}: {conflict}" for conflict in conflicts]
        made = _pool(
            name, facts_of_pool, fleet, now_s, is_tokenizer, checks, notes=conflicts, contested=claims, owners=owners
        )
        pools.append(made)
    return FleetUpdate(version=version, pools=pools, degraded=problems)


def awaited(before: FleetUpdate, now: FleetUpdate) -> FleetUpdate:
    """Return the fleet with those pools of the fleet before that have lost their last server, without replicas.

    While some server was not asked yet, nobody knows whether it is the one that takes a lost server's place: requests
    wait for it instead of being told that nobody serves their model. A pool whose names others serve has its heirs.
    """
    names = {name for pool in now.pools for name in (pool.name, *pool.models)}
    lost = [pool for pool in before.pools if names.isdisjoint((pool.name, *pool.models))]
    if not now.is_partial or not lost:
        return now
    words = [f"pool {pool.name}: its last server left, others were not asked yet" for pool in lost]
    kept = [msgspec.structs.replace(pool, replicas=[]) for pool in lost]
    return msgspec.structs.replace(now, pools=[*now.pools, *kept], degraded=[*now.degraded, *words])


def _pool(
    name: str,
    servers: Sequence[ServerFacts],
    fleet: FleetConfig,
    now_s: float,
    is_tokenizer: Callable[[str], bool],
    checks: Mapping[str, TokenCheck],
    *,
    notes: list[str],
    contested: Mapping[str, list[str]],
    owners: Mapping[str, str],
) -> PoolUpdate:
    model = _model_config(servers, fleet)
    tokenizer = _tokenizer(servers, fleet, model, is_tokenizer)
    served = {served: adapter for served, adapter in _served(servers).items() if owners[served] == name}
    replicas = [
        _replica(
            facts,
            rank,
            lacks=sorted(served.keys() - {card.id for card in facts.cards}),
            now_s=now_s,
            notes=[*notes, *_token_notes(tokenizer, checks.get(facts.server.url))],
            contested=contested,
        )
        for facts in servers
        for rank in facts.ranks
    ]
    return PoolUpdate(
        name=name,
        models=served,
        tokenizer=tokenizer,
        replicas=replicas,
        model_cards=_cards(servers, served),
        template=_template(servers, model),
    )


def _base_name(facts: ServerFacts) -> str:
    """The first base model name; engines list base models before adapters, in the order they were given."""
    return next((card.id for card in facts.cards if card.parent is None), facts.cards[0].id)


def _served(servers: Sequence[ServerFacts]) -> dict[str, str | None]:
    """Served name → adapter. What ready servers serve counts; what only missing ones served stays known."""
    ordered = sorted(servers, key=lambda facts: not facts.ready)
    served: dict[str, str | None] = {}
    for card in (card for facts in ordered for card in facts.cards):
        served.setdefault(card.id, card.id if card.parent is not None else None)
    return served


def _cards(servers: Sequence[ServerFacts], names: Collection[str]) -> list[str]:
    cards: dict[str, str] = {}
    for card in (card for facts in servers for card in facts.cards if card.id in names):
        cards.setdefault(card.id, card.raw)
    return list(cards.values())


def _base_cards(servers: Iterable[ServerFacts]) -> list[tuple[str, ModelCard]]:
    return [(facts.server.url, card) for facts in servers for card in facts.cards if card.parent is None]


def _model_config(servers: Sequence[ServerFacts], fleet: FleetConfig) -> ModelConfig:
    names = (card.id for _, card in _base_cards(servers))
    return next((fleet.models[name] for name in names if name in fleet.models), ModelConfig())


def _tokenizer(
    servers: Sequence[ServerFacts], fleet: FleetConfig, model: ModelConfig, is_tokenizer: Callable[[str], bool]
) -> str | None:
    """Configured for the model, configured for all, or the engine's own model directory when it is readable here."""
    configured = model.tokenizer or fleet.tokenizer
    if configured is not None:
        return configured
    cards = [card for _, card in _base_cards(servers)]
    paths = [card.root for card in cards if card.root] + [card.id for card in cards]
    return next((path for path in paths if is_tokenizer(path)), None)


def _template(servers: Sequence[ServerFacts], model: ModelConfig) -> TemplateOptions:
    versions = [facts.version for facts in servers if facts.version]
    lengths = [card.max_model_len for _, card in _base_cards(servers) if card.max_model_len]
    return TemplateOptions(
        chat_template=model.chat_template,
        content_format=model.content_format,
        default_kwargs=msgspec.json.encode(model.template_kwargs).decode() if model.template_kwargs else None,
        exclude_tools_when_none=model.exclude_tools_when_none,
        trust_request_template=model.trust_request_template,
        engine_version=versions[0] if versions else None,
        max_model_len=min(lengths, default=None),
    )


def _replica(
    facts: ServerFacts,
    rank: int,
    *,
    lacks: list[str],
    now_s: float,
    notes: list[str],
    contested: Mapping[str, list[str]],
) -> ReplicaUpdate:
    url, is_one_of_several = facts.server.url, len(facts.ranks) > 1
    metrics = facts.metrics.ranks.get(rank) if facts.metrics else None
    source, source_note = _source(facts, rank, contested)
    own_notes = [facts.reason, source_note, _lack_note(lacks), _load_note(facts), _caching_note(facts, rank)]
    return ReplicaUpdate(
        id=f"{url}#{rank}" if is_one_of_several else url,
        url=url,
        rank=rank if is_one_of_several else None,
        engine=facts.engine,
        ready=facts.ready,
        incarnation=facts.identity,
        notes=[note for note in own_notes if note] + notes,
        block_size=facts.server.block_size or (metrics.block_size if metrics else None),
        capacity_tokens=metrics.capacity_tokens if metrics else None,
        events=source,
        headers=facts.headers,
        load=EngineLoad(
            running=metrics.running if metrics else None,
            waiting=metrics.waiting if metrics else None,
            kv_usage=metrics.kv_usage if metrics else None,
            age_s=max(0.0, now_s - facts.scraped_s) if facts.scraped_s is not None else None,
            worked_tokens=metrics.worked_tokens if metrics else None,
            rtt_s=facts.rtt_s,
        ),
        lacks=lacks,
        tls=tls_options(facts.server),
    )


def _source(facts: ServerFacts, rank: int, contested: Mapping[str, list[str]]) -> tuple[EventSource | None, str | None]:
    """Where this rank publishes; a stream that another server has a better claim to is not attributed twice."""
    source = facts.sources.get(rank)
    if source is None:
        return None, facts.sources_note or f"publishes no KV events for rank {rank}"
    rivals = [url for url in contested.get(source.endpoint, []) if url != facts.server.url]
    if rivals:
        claim = f"KV events at {source.endpoint} are claimed by {', '.join(rivals)} too"
        return None, f"{claim}: give `events` in the configuration"
    return source, None


_STRENGTH = {"configuration": 0, "engine": 1, "default_port": 2}


def _contested(servers: Iterable[ServerFacts]) -> dict[str, list[str]]:
    """Endpoint → servers with the strongest claim to it, for endpoints that several ready servers claim.

    A server outside the list lost its claim; two on it have equal claims, and neither can be believed.
    """
    claims: dict[str, list[tuple[int, str]]] = {}
    for facts in (facts for facts in servers if facts.ready):
        for source in facts.sources.values():
            claims.setdefault(source.endpoint, []).append((_STRENGTH[source.origin], facts.server.url))
    several = {endpoint: made for endpoint, made in claims.items() if len(made) > 1}
    return {endpoint: [url for strength, url in made if strength == min(made)[0]] for endpoint, made in several.items()}


def _token_notes(tokenizer: str | None, check: TokenCheck | None) -> list[str]:
    if tokenizer is None:
        return ["tokenizer unknown: routed by bytes; give --tokenizer with the model's directory"]
    return [check.note] if check is not None and check.note else []


def _lack_note(lacks: list[str]) -> str | None:
    return f"does not serve {', '.join(lacks)}, which others of its pool do" if lacks else None


def _load_note(facts: ServerFacts) -> str | None:
    is_silent = facts.ready and (facts.metrics is None or not facts.metrics.ranks)
    return "reports no load: /metrics has none of the known names" if is_silent else None


def _caching_note(facts: ServerFacts, rank: int) -> str | None:
    metrics = facts.metrics.ranks.get(rank) if facts.metrics else None
    is_off = metrics is not None and metrics.prefix_caching is False
    return "prefix caching is off: start it with --enable-prefix-caching" if is_off else None


def _conflicts(servers: Sequence[ServerFacts]) -> list[str]:
    """Say where servers of one pool contradict each other about a base model."""
    found = []
    by_name: dict[str, list[tuple[str, ModelCard]]] = {}
    for url, card in _base_cards(servers):
        by_name.setdefault(card.id, []).append((url, card))
    for name, cards in by_name.items():
        for what, values in (
            ("root", [(url, card.root) for url, card in cards]),
            ("max_model_len", [(url, card.max_model_len) for url, card in cards]),
        ):
            if len(Counter(value for _, value in values)) > 1:
                said = ", ".join(f"{url} says {value}" for url, value in values)
                found.append(f"{name} has different {what}: {said}")
    return found


def _owners(members: Mapping[str, Sequence[ServerFacts]]) -> dict[str, str]:
    """Served name → the one pool that gets its requests: the pool of that name, else the first that serves it."""
    owners = {name: name for name in members}
    for pool, servers in members.items():
        for name in _served(servers):
            owners.setdefault(name, pool)
    return owners


def _shared_names(members: Mapping[str, Sequence[ServerFacts]], owners: Mapping[str, str]) -> list[str]:
    """Say which names more than one pool serves, and which of them gets the requests."""
    servers_of: dict[str, list[str]] = {}
    for pool, servers in members.items():
        for name in _served(servers):
            servers_of.setdefault(name, []).append(pool)
    shared = {name: pools for name, pools in servers_of.items() if len(pools) > 1}
    return [f"{name} is served by pools {', '.join(pools)}: {owners[name]} gets it" for name, pools in shared.items()]
