"""A client's TLS credentials, from files that may be renewed."""

from __future__ import annotations

import ssl
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import InvalidFieldError
from paceline.followed_files import FollowedFiles
from paceline.plain_files import read_plain_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    import grpc

MOST_PEM_BYTES = 1 << 20
"""A file with certificates or a key: all authorities that a system trusts take 220 KB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The certificates of TLS and mTLS: PEM, in files or as bytes.

    Attributes:
        ca_file: The trusted certificate authorities. Default: the system's.
        certificate_file: The client's own certificate, for mTLS.
        key_file: Its private key.
        server_name: The name in the server's certificate, if it differs from the address.
        ca: The content of a ca_file.
        certificate: The content of a certificate_file.
        key: The content of a key_file.
    """

    ca_file: Path | str | None = None
    certificate_file: Path | str | None = None
    key_file: Path | str | None = None
    server_name: str | None = None
    ca: bytes | None = field(default=None, repr=False)
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)


class Credentials:
    """The credentials of new connections. Renewed files are used without a restart.

    While files cannot be used, as in the middle of a renewal, the credentials before them stay.

    Raises:
        InvalidFieldError: A file is unusable at the start.
    """

    def __init__(self, tls: Tls) -> None:
        paths = (tls.ca_file, tls.certificate_file, tls.key_file)
        self._files = FollowedFiles([it for it in paths if it is not None], partial(_load, tls))

    def current(self) -> grpc.ChannelCredentials:
        """Return the credentials: the same object until a file changes."""
        return self._files.content()


def _load(tls: Tls) -> grpc.ChannelCredentials:
    import grpc

    has_certificate = tls.certificate_file is not None or tls.certificate is not None
    if has_certificate != (tls.key_file is not None or tls.key is not None):
        raise InvalidFieldError.of("tls", "a certificate and its key belong together")
    authorities = _content("ca", path=tls.ca_file, content=tls.ca)
    certificate = _content("certificate", path=tls.certificate_file, content=tls.certificate)
    key = _content("key", path=tls.key_file, content=tls.key)
    _check_authorities(tls, authorities)
    if certificate is not None and key is not None:
        _check_own(tls, certificate, key)
    return grpc.ssl_channel_credentials(
        root_certificates=authorities, private_key=key, certificate_chain=certificate
    )


def _check_authorities(tls: Tls, authorities: bytes | None) -> None:
    """Refuse authorities that TLS cannot use: gRPC would retry the connection for ever."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if authorities is not None:
            context.load_verify_locations(cadata=authorities.decode(errors="replace"))
    except (ssl.SSLError, ValueError) as error:
        what = f"{tls.ca_file}: " if tls.ca_file is not None else ""
        field_name = "tls.ca_file" if tls.ca_file is not None else "tls.ca"
        raise InvalidFieldError.of(field_name, f"{what}has no usable certificate") from error


def _check_own(tls: Tls, certificate: bytes, key: bytes) -> None:
    """Refuse a certificate and a key that TLS cannot use, or that do not match."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        with _as_files(certificate, key) as (own, private):
            # A password, so that an encrypted key does not ask the terminal for one.
            context.load_cert_chain(own, private, password="")
    except (ssl.SSLError, ValueError) as error:
        from_file = tls.certificate_file is not None
        what = f"{tls.certificate_file} and {tls.key_file}: " if from_file else ""
        raise InvalidFieldError.of(
            "tls.certificate_file" if from_file else "tls.certificate",
            f"{what}are no usable certificate and key",
        ) from error


@contextmanager
def _as_files(*contents: bytes) -> Iterator[list[Path]]:
    """Lend files that only this user can read: Python's ssl takes files only."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{index}.pem") for index in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.touch(mode=0o600)
            path.write_bytes(content)
        yield paths


def _content(name: str, *, path: Path | str | None, content: bytes | None) -> bytes | None:
    if path is None:
        if not isinstance(content, bytes | None):
            raise InvalidFieldError.of(
                f"tls.{name}", f"must be bytes; a path goes into {name}_file"
            )
        return content
    if content is not None:
        raise InvalidFieldError.of(f"tls.{name}", f"and {name}_file are both given: give one")
    try:
        return read_plain_file(path, most_bytes=MOST_PEM_BYTES)
    except OSError as error:
        raise InvalidFieldError.of(f"tls.{name}_file", f"{path}: {error.strerror}") from error
