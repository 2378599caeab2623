"""A name server on a UDP port of loopback, with the records that a test sets."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class NameServer(asyncio.DatagramProtocol):
    """Answers from `records`; `is_silent`: not at all."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        """Name with its last dot and type, for example `("engines.test.", "A")` → texts of the records."""
        self.is_silent = False
        self.asked: list[str] = []
        self._transport: asyncio.DatagramTransport | None = None

    @property
    def address(self) -> str:
        assert self._transport is not None
        host, port = self._transport.get_extra_info("sockname")
        return f"{host}:{port}"

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))

    def stop(self) -> None:
        assert self._transport is not None
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        question = dns.message.from_wire(data)
        name, kind = question.question[0].name, dns.rdatatype.to_text(question.question[0].rdtype)
        self.asked.append(kind)
        if self.is_silent:
            return
        answer = dns.message.make_response(question)
        answer.flags |= dns.flags.RA
        if texts := self.records.get((name.to_text(), kind)):
            answer.answer.append(dns.rrset.from_text(name, 3600, "IN", kind, *texts))
        elif not any(known == name.to_text() for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        assert self._transport is not None
        self._transport.sendto(answer.to_wire(), addr)
