"""Who may use the admin API, and with which credentials engines are asked.

Everything secret lies in files and is read again when they change; what cannot be read leaves the last good value in
charge. What one would get wrong: a start looks here before it listens, so nothing that is slow to import belongs here.
"""

from __future__ import annotations

import ipaddress
import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from warmfront.config import ControlConfig, ServerConfig, TlsConfig, with_variables
from warmfront.control.files import Version, read_secret, version_of
from warmfront.errors import ConfigError
from warmfront.types import TlsOptions

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


class Watched(Generic[Value]):
    """A value made from files, made again when one of them changes. A bad change leaves the old value in charge."""

    def __init__(self, field: str, paths: Sequence[str], load: Callable[[], Value]) -> None:
        """Load for the first time.

        Args:
            field: Of the configuration, for the log.
            paths: The files.
            load: Makes the value; raises `ConfigError`.

        Raises:
            ConfigError: From `load`: there is nothing yet that could stay in charge.
        """
        self._field = field
        self._paths = paths
        self._load = load
        self._seen = self._versions()
        self._value = load()

    def current(self) -> Value:
        """Return the value of the files as they are now."""
        versions = self._versions()
        if versions != self._seen:
            self._seen = versions
            try:
                self._value = self._load()
                logger.info("%s: read again", self._field)
            except ConfigError as error:
                logger.warning("%s: %s; what was read before stays in charge", self._field, error)
        return self._value

    def _versions(self) -> list[Version | None]:
        return [_version(path) for path in self._paths]


def _version(path: str) -> Version | None:
    try:
        return version_of(Path(path).stat())
    except OSError:
        return None  # it is not there


def require_safe_admin(control: ControlConfig) -> None:
    """Refuse an admin port that others than this machine can reach and that asks nobody who they are.

    Raises:
        ConfigError: It is such a port, or its token or certificate cannot be read.
    """
    host = control.admin_listen.rpartition(":")[0].strip("[]")
    if control.admin_token_file is None and not _is_loopback(host):
        raise ConfigError(f"control.admin_listen: {control.admin_listen} is not loopback and needs admin_token_file")
    if control.admin_token_file is not None:
        read_secret(control.admin_token_file)
    if control.admin_tls is not None:
        server_context(control.admin_tls)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def server_context(tls: TlsConfig) -> ssl.SSLContext:
    """Return the context of a listening port.

    Raises:
        ConfigError: A file cannot be read, or certificate and key do not belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_files(context, cert=tls.cert, key=tls.key, ca=tls.client_ca)
    context.verify_mode = ssl.CERT_REQUIRED if tls.client_ca else ssl.CERT_NONE
    return context


class EngineAccess:
    """Headers and TLS towards one server, as the core sends them too."""

    def __init__(self, server: ServerConfig) -> None:
        """Prepare; files are read when they are asked for."""
        self._server = server
        self._headers: Watched[dict[str, str]] | None = None
        self._context: Watched[ssl.SSLContext] | None = None

    def secret_headers(self) -> dict[str, str]:
        """Return the headers whose values lie in files or in the environment.

        Raises:
            ConfigError: A file cannot be read, and never could, or a variable is not set.
        """
        from_env = {name: with_variables(text) for name, text in self._server.headers_from_env.items()}
        files = self._server.headers_from_file
        if not files:
            return from_env
        if self._headers is None:
            self._headers = Watched(
                f"headers of {self._server.url}",
                list(files.values()),
                lambda: {name: read_secret(path) for name, path in files.items()},
            )
        return self._headers.current() | from_env

    def tls(self) -> ssl.SSLContext | bool:
        """Return what aiohttp takes as `ssl`: the context of an https server, else its default.

        Raises:
            ConfigError: A file cannot be read, and never could.
        """
        options = tls_options(self._server)
        if options is None:
            return True
        if self._context is None:
            paths = [path for path in (options.ca, options.cert, options.key) if path is not None]
            self._context = Watched(f"TLS of {self._server.url}", paths, lambda: _client_context(options))
        return self._context.current()


def tls_options(server: ServerConfig) -> TlsOptions | None:
    """Return how TLS is spoken with a server; `None`: not at all."""
    if not server.url.startswith("https://"):
        return None
    return TlsOptions(ca=server.ca, cert=server.client_cert, key=server.client_key)


def _client_context(options: TlsOptions) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if options.ca is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # that authority alone, as the core does
    load_files(context, cert=options.cert, key=options.key, ca=options.ca)
    return context


def load_files(context: ssl.SSLContext, *, cert: str | None, key: str | None, ca: str | None) -> None:
    """Put PEM files into a context; `None`: nothing to put.

    Raises:
        ConfigError: A file cannot be read, or certificate and key do not belong together.
    """
    try:
        if ca is not None:
            context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot read {ca}: {error.strerror or error}") from error
    try:
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use {cert} with {key}: {error.strerror or error}") from error
