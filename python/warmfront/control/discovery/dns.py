"""Servers from DNS: the addresses of a name, or its SRV records.

Asked by `dnspython` (its own client, no thread per question, SRV) and not by the system's resolver, so `/etc/hosts`
does not count; `/etc/resolv.conf` with its search domains does. An answer without records counts as failed: a name that
loses all its addresses is a broken name server far more often than a fleet without servers.
"""

from __future__ import annotations

import socket

import dns.asyncresolver
import dns.exception
import dns.nameserver
import dns.rdtypes.IN.SRV

from warmfront.config import DnsSource, ServerConfig, SrvSource
from warmfront.control.discovery import DiscoveryError

FAMILIES = {"auto": socket.AF_UNSPEC, "ipv4": socket.AF_INET, "ipv6": socket.AF_INET6}
DNS_PORT = 53


class AddressReader:
    """The A or AAAA records of a name, with one port."""

    def __init__(self, config: DnsSource) -> None:
        self.name = f"dns {config.name}:{config.port}"
        self.interval_s = config.interval_s
        self._config = config

    async def read(self) -> list[ServerConfig]:
        """Return a server for each address, in order.

        Raises:
            DiscoveryError: The name cannot be resolved, or has no address.
        """
        config = self._config
        try:
            answers = await _resolver(config).resolve_name(config.name, FAMILIES[config.family], search=True)
        except (dns.exception.DNSException, OSError) as error:
            raise DiscoveryError(_reason(error)) from error
        found = list(answers.addresses_and_families())
        v4 = sorted({address for address, family in found if family == socket.AF_INET})
        hosts = v4 or sorted({f"[{address}]" for address, _ in found})
        return [_server(f"http://{host}:{config.port}", config) for host in hosts]


class SrvReader:
    """The SRV records of a name: host and port of each server."""

    def __init__(self, config: SrvSource) -> None:
        self.name = f"srv {config.name}"
        self.interval_s = config.interval_s
        self._config = config

    async def read(self) -> list[ServerConfig]:
        """Return a server for each record, in order.

        Raises:
            DiscoveryError: The name cannot be resolved, or has no such record.
        """
        config = self._config
        try:
            answer = await _resolver(config).resolve(config.name, "SRV", search=True)
        except (dns.exception.DNSException, OSError) as error:
            raise DiscoveryError(_reason(error)) from error
        targets = {
            (record.target.to_text(omit_final_dot=True), record.port)
            for record in answer
            if isinstance(record, dns.rdtypes.IN.SRV.SRV) and record.port
        }
        return [_server(f"http://{host}:{port}", config) for host, port in sorted(targets)]


def _resolver(config: DnsSource | SrvSource) -> dns.asyncresolver.Resolver:
    """A resolver without cache, as the machine is configured now: `resolv.conf` may change while we run."""
    try:
        resolver = dns.asyncresolver.Resolver(configure=not config.nameservers)
    except dns.exception.DNSException as error:
        raise DiscoveryError(f"no name server is configured: {error}") from error
    resolver.lifetime = config.timeout_s
    if config.nameservers:
        resolver.nameservers = [_nameserver(text) for text in config.nameservers]
    return resolver


def _nameserver(text: str) -> dns.nameserver.Nameserver:
    host, colon, port = text.rpartition(":")
    if colon and (host.startswith("[") or ":" not in host):
        return dns.nameserver.Do53Nameserver(host.strip("[]"), int(port))
    return dns.nameserver.Do53Nameserver(text, DNS_PORT)


def _reason(error: Exception) -> str:
    match error:
        case dns.exception.Timeout():
            return "no answer in time"
        case OSError():
            return f"cannot ask: {error.strerror}"
        case _:
            return str(error) or type(error).__name__


def _server(url: str, config: DnsSource | SrvSource) -> ServerConfig:
    return ServerConfig(url=url, engine=config.engine, headers=config.headers)
