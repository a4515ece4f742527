"""TLS and passwords of the metrics: who is let in, what is wrong with a file, and that renewed ones are taken."""

from __future__ import annotations

import base64
import datetime
import os
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import bcrypt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gputail.config import Address, Settings
from gputail.errors import GputailError, UsageError
from gputail.surfaces.metrics import SnapshotCollector
from gputail.surfaces.metrics_access import MAX_REMEMBERED, Access
from gputail.surfaces.metrics_server import MetricsServer

HASH = bcrypt.hashpw(b"s3cret", bcrypt.gensalt(4)).decode()


def certificate(folder: Path, name: str = "one", encrypted: bool = False) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    guard = serialization.BestAvailableEncryption(b"x") if encrypted else serialization.NoEncryption()
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, guard))
    return paths


def settings(cert: Path | None = None, key: Path | None = None, auth: Path | None = None) -> Settings:
    made = (str(path) if path else None for path in (cert, key, auth))
    return Settings(**dict(zip(("metrics_tls_cert", "metrics_tls_key", "metrics_auth_file"), made, strict=True)))


@contextmanager
def served(made: Settings) -> Iterator[Address]:
    server = MetricsServer(Address("localhost", 0), SnapshotCollector(), Access(made))
    try:
        yield server.address
    finally:
        server.close()


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def status(url: str, authorization: str | None = None, trusted: Path | None = None) -> int:
    request = urllib.request.Request(url, headers={"Authorization": authorization} if authorization else {})
    context = ssl.create_default_context(cafile=str(trusted)) if trusted else None
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            assert b"gputail_build_info" in answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        assert b"gputail_" not in error.read()
        return error.code


@pytest.fixture
def passwords(tmp_path: Path) -> Path:
    path = tmp_path / "htpasswd"
    path.write_text(f"# who may scrape\n\nprometheus:{HASH}\n")
    return path


def test_metrics_are_served_over_tls_and_not_without_it(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with served(settings(cert, key)) as address:
        assert status(f"https://{address}/metrics", trusted=cert) == 200
        with pytest.raises(OSError):
            status(f"http://{address}/metrics")


def test_who_stalls_in_the_handshake_delays_nobody(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with served(settings(cert, key)) as address, socket.create_connection((address.host, address.port)):
        assert status(f"https://{address}/metrics", trusted=cert) == 200


def test_a_renewed_certificate_is_taken_and_a_broken_one_is_said_and_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = certificate(tmp_path)
    with served(settings(cert, key)) as address:
        later = certificate(tmp_path, "two")
        for new, old in zip(later, (cert, key), strict=True):
            os.replace(new, old)
        assert status(f"https://{address}/metrics", trusted=cert) == 200
        trusted = tmp_path / "kept.pem"
        trusted.write_bytes(cert.read_bytes())
        cert.write_text("no certificate")
        for _ in range(2):
            assert status(f"https://{address}/metrics", trusted=trusted) == 200
    err = capsys.readouterr().err
    assert err.count("what was read before stays in force") == 1 and str(cert) in err


def test_only_who_has_a_name_and_its_password_is_let_in(passwords: Path) -> None:
    with served(settings(auth=passwords)) as address:
        url = f"http://{address}/metrics"
        assert [status(url, basic("prometheus", "s3cret")) for _ in range(2)] == [200, 200]
        refused = [
            None, "", "Basic", "Basic !", "Basic \xe9", "Basic cHJvbWV0aGV1cw==", "Basic /zr/",
            "Bearer s3cret", basic("prometheus", "wrong"), basic("prometheus", ""), basic("nobody", "s3cret"), basic("", "s3cret"),
            basic("prometheus", "s3cret\0"), basic("prometheus", "x" * 100), basic("prometheus", HASH),
        ]  # fmt: skip
        assert [status(url, one) for one in refused] == [401] * len(refused)


def test_a_refusal_says_how_to_ask(passwords: Path) -> None:
    with served(settings(auth=passwords)) as address, pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://{address}/metrics", timeout=10)
    assert caught.value.headers["WWW-Authenticate"].startswith('Basic realm="gputail"')


def test_a_changed_file_of_passwords_is_taken_also_for_those_let_in_before(passwords: Path) -> None:
    access = Access(settings(auth=passwords))
    assert access.allows(basic("prometheus", "s3cret"))
    passwords.write_text(f"prometheus:{bcrypt.hashpw(b'other', bcrypt.gensalt(4)).decode()}\nsecond:{HASH}\n")
    asked = [("prometheus", "s3cret"), ("prometheus", "other"), ("second", "s3cret")]
    assert [access.allows(basic(*one)) for one in asked] == [False, True, True]


def test_passwords_that_were_right_are_remembered_and_wrong_ones_are_not(passwords: Path) -> None:
    access = Access(settings(auth=passwords))
    checked = []
    check = access._check
    access._check = lambda password, hashed: checked.append(password) or check(password, hashed)
    for password in ("s3cret", "s3cret", "wrong", "wrong", "s3cret"):
        access.allows(basic("prometheus", password))
    assert checked == [b"s3cret", b"wrong", b"wrong"]
    passwords.write_text("".join(f"u{number}:{HASH}\n" for number in range(3)))
    for number in range(3 * MAX_REMEMBERED):
        assert access.allows(basic(f"u{number % 3}", "s3cret"))
    assert len(access._remembered) <= MAX_REMEMBERED


def no_key(folder: Path) -> Settings:
    return settings(certificate(folder)[0], folder / "none.key")


def of_another(folder: Path) -> Settings:
    return settings(certificate(folder)[0], certificate(folder, "two")[1])


def no_pem(folder: Path) -> Settings:
    (folder / "c.pem").write_text("nothing of the sort")
    return settings(folder / "c.pem", certificate(folder)[1])


def encrypted(folder: Path) -> Settings:
    return settings(*certificate(folder, encrypted=True))


def plain_password(folder: Path) -> Settings:
    (folder / "htpasswd").write_text(f"a:{HASH}\nprometheus:s3cret\n")
    return settings(auth=folder / "htpasswd")


def nobody(folder: Path) -> Settings:
    (folder / "htpasswd").write_text("# nobody\n")
    return settings(auth=folder / "htpasswd")


def a_folder(folder: Path) -> Settings:
    return settings(auth=folder)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (no_key, "cannot read the key {}/none.key: no such file or directory"),
        (of_another, "certificate {0}/one.pem and key {0}/two.key cannot be used: key values mismatch"),
        (no_pem, "certificate {0}/c.pem and key {0}/one.key cannot be used"),
        (encrypted, "the key {}/one.key is encrypted"),
        (plain_password, "{}/htpasswd:2: not NAME:HASH with a bcrypt hash"),
        (nobody, "{}/htpasswd has no passwords"),
        (a_folder, "cannot read the passwords {}: is a directory"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_file_that_cannot_be_used_is_one_clear_error_that_names_it(
    made: Callable[[Path], Settings], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(GputailError) as caught:
        Access(made(tmp_path))
    assert caught.value.problem.startswith(problem.format(tmp_path))


def test_a_certificate_without_a_key_is_wrong_usage(tmp_path: Path) -> None:
    for made in (settings(tmp_path / "a"), settings(key=tmp_path / "a")):
        with pytest.raises(UsageError, match="metrics_tls_cert and metrics_tls_key"):
            Access(made)


def test_without_bcrypt_the_error_says_how_to_get_it(passwords: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bcrypt", None)
    with pytest.raises(GputailError, match="bcrypt is needed") as caught:
        Access(settings(auth=passwords))
    assert "python3-bcrypt" in caught.value.hint
