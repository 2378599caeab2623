"""Small workloads and regimes for tests of the lab."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from warmfront.lab.model import EngineSpec, EventSpec, FleetSpec, Regime, SimRequest, Slo


class Chats:
    """Sessions of a few turns at random times; a prompt is the conversation so far behind one of seven systems."""

    def __init__(self, *, seed: int, sessions: int, rate: float, turns: int = 3, system: int = 1000) -> None:
        self._random = Random(seed)
        self._sessions, self._rate, self._turns, self._system = sessions, rate, turns, system
        self._created = 0

    def arrivals(self) -> Iterator[SimRequest]:
        at_s = 0.0
        for session in range(self._sessions):
            at_s += self._random.expovariate(self._rate)
            prompt = ((1 + session % 7, self._system), self._said())
            yield self._request(at_s, prompt, session=session, turn=0)

    def finished(self, request: SimRequest, now_s: float) -> Sequence[SimRequest]:
        if request.turn + 1 >= self._turns or request.answer is None:
            return []
        prompt = (*request.prompt, (request.answer, request.output_tokens), self._said())
        return [self._request(now_s + 1.0, prompt, session=request.session or 0, turn=request.turn + 1)]

    def _said(self) -> tuple[int, int]:
        return self._random.getrandbits(48), self._random.randint(20, 400)

    def _request(self, at_s: float, prompt: tuple[tuple[int, int], ...], *, session: int, turn: int) -> SimRequest:
        key, self._created = self._created, self._created + 1
        return SimRequest(
            key,
            at_s,
            prompt,
            self._random.randint(1, 200),
            answer=self._random.getrandbits(48),
            session=session,
            turn=turn,
        )


class Given:
    """Exactly these requests."""

    def __init__(self, *requests: SimRequest) -> None:
        self._requests = requests

    def arrivals(self) -> Iterator[SimRequest]:
        return iter(self._requests)

    def finished(self, request: SimRequest, now_s: float) -> Sequence[SimRequest]:
        return []


def regime(*engines: EngineSpec, events: EventSpec | None = None, requests: int = 100, block_size: int = 64) -> Regime:
    """A regime around a fleet; its workload is given beside it."""
    return Regime(
        name="small",
        title="small",
        expects="nothing",
        workload={},
        fleet=FleetSpec(
            engines or (EngineSpec("llama-3.1-8b-h100", count=4),),
            block_size=block_size,
            events=events or EventSpec(),
        ),
        slo=Slo(ttft_s=1.0),
        loads=(1.0,),
        requests=requests,
    )
