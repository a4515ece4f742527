"""Who may scrape: TLS and passwords for the server of metrics.

In: the names of a certificate, a key and a file of passwords. Out: an `Access` that the server asks at each connection and request.
The files are read again when they have changed, so that a renewed certificate takes no restart; what cannot be read then is said, and
what was read last stays in force.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from gputail.config import Settings
from gputail.errors import GputailError, UsageError
from gputail.journal import WARNING, say

MAX_FILE_BYTES = 1 << 20
MAX_REMEMBERED = 64  # passwords that were right: bcrypt is slow on purpose
MAX_PASSWORD_BYTES = 72  # that bcrypt looks at
_ENTRY = re.compile(r"([^:\s]+):(\$2[aby]\$\d\d\$[./A-Za-z0-9]{53})")

Value = TypeVar("Value")


class Access:
    """What settings ask for; without a certificate or passwords everybody is let in. GputailError names the file that is wrong."""

    def __init__(self, settings: Settings) -> None:
        self._context: _Reread[ssl.SSLContext] | None = None
        self._users: _Reread[Mapping[str, bytes]] | None = None
        certificate, key, passwords = settings.metrics_tls_cert, settings.metrics_tls_key, settings.metrics_auth_file
        if bool(certificate) != bool(key):
            raise UsageError("of metrics_tls_cert and metrics_tls_key one is given alone", "TLS takes both, a certificate and its key")
        if certificate and key:
            self._context = _Reread((certificate, key), lambda: _load_context(certificate, key))
        if passwords:
            self._check = _bcrypt()
            self._users = _Reread((passwords,), lambda: _load_users(passwords))
        self._secret = secrets.token_bytes(32)
        self._remembered: set[bytes] = set()
        self._one_at_a_time = threading.Lock()

    @property
    def scheme(self) -> str:
        return "https" if self._context else "http"

    def wrap(self, connection: Any) -> Any:
        """The connection with TLS where there is a certificate: a handshake, which may take until the socket's timeout."""
        return self._context.get().wrap_socket(connection, server_side=True) if self._context else connection

    def allows(self, authorization: str) -> bool:
        """Whether a request with this header may be answered."""
        if self._users is None:
            return True
        kind, _, encoded = authorization.partition(" ")
        try:
            user, colon, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
        except ValueError:
            return False
        return kind.lower() == "basic" and bool(colon) and self._is_right(user, password.encode()[:MAX_PASSWORD_BYTES])

    def _is_right(self, user: str, password: bytes) -> bool:
        users = self._users.get() if self._users else {}
        # A name that is not there takes as long, so that the time does not tell.
        hashed = users.get(user) or next(iter(users.values()))
        seen = hmac.new(self._secret, hashed + b"\0" + password, hashlib.sha256).digest()
        if user in users and seen in self._remembered:
            return True
        with self._one_at_a_time:  # however many guess, they cost one CPU
            try:
                is_right = self._check(password, hashed) and user in users
            except ValueError:  # a NUL in it
                return False
            if is_right:
                if len(self._remembered) >= MAX_REMEMBERED:
                    self._remembered.clear()
                self._remembered.add(seen)
        return is_right


class _Reread(Generic[Value]):
    """What `load` makes of files, made anew once they have changed."""

    def __init__(self, paths: Sequence[str], load: Callable[[], Value]) -> None:
        self._paths, self._load = paths, load
        self._seen = self._look()
        self._value = load()

    def get(self) -> Value:
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            try:
                self._value = self._load()
            except GputailError as error:
                say(f"{error.problem}; what was read before stays in force", WARNING)
        return self._value

    def _look(self) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for path in self._paths:
            try:
                status = os.stat(path)
                found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
            except OSError:
                found.append(())
        return found


def _read(what: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise GputailError(f"cannot read {what} {path}: {(error.strerror or str(error)).lower()}") from error
    if len(content) > MAX_FILE_BYTES:
        raise GputailError(f"{what} {path} is larger than {MAX_FILE_BYTES} bytes", "is it the right file?")
    return content


def _load_context(certificate: str, key: str) -> ssl.SSLContext:
    _read("the certificate", certificate)  # ssl's errors do not say which file
    _read("the key", key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def no_password() -> str:
        raise GputailError(f"the key {key} is encrypted", "openssl pkey -in KEY -out PLAIN writes one that is not")

    try:
        context.load_cert_chain(certificate, key, no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        problem = f"certificate {certificate} and key {key} cannot be used: {reason.lower().replace('_', ' ')}"
        raise GputailError(problem, "both in PEM; the certificate first, then those that it was issued by") from error
    return context


def _load_users(path: str) -> Mapping[str, bytes]:
    """Names and hashes of a file as htpasswd writes it: NAME:HASH in each line."""
    hint = "htpasswd -nB NAME makes a line"
    users = {}
    for number, line in enumerate(_read("the passwords", path).decode(errors="replace").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        entry = _ENTRY.fullmatch(line.strip())
        if entry is None:
            raise GputailError(f"{path}:{number}: not NAME:HASH with a bcrypt hash ($2y$...)", hint)
        users[entry[1]] = entry[2].encode()
    if not users:
        raise GputailError(f"{path} has no passwords, so that nobody could scrape", hint)
    return users


def _bcrypt() -> Callable[[bytes, bytes], bool]:
    try:
        import bcrypt
    except ImportError as error:
        raise GputailError(
            "bcrypt is needed to check passwords", "apt-get install python3-bcrypt, or pip install 'gputail[auth]'"
        ) from error
    return bcrypt.checkpw
