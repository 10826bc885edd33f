"""Throw-away certificates: of an authority that nobody else trusts, for hosts and for roles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from paceline_serving.security import TlsFiles

if TYPE_CHECKING:
    from pathlib import Path

ORCHESTRATOR = "spiffe://paceline/orchestrator"
CLIENT = "spiffe://paceline/client"


class Certificates:
    """A throw-away authority, and files of the certificates that it issues."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authority = trustme.CA()
        self.authority = directory / "authority.pem"
        self._authority.cert_pem.write_to_path(str(self.authority))

    def issue(self, identity: str) -> TlsFiles:
        """Issue a certificate for a host name, or for a SPIFFE id."""
        spiffe = identity.startswith("spiffe://")
        issued = self._authority.issue_cert("peer.invalid" if spiffe else identity)
        chain = issued.cert_chain_pems[0].bytes()
        if spiffe:
            chain = self._with_uri(chain, identity)
        name = identity.rpartition("/")[2]
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        certificate.write_bytes(chain)
        issued.private_key_pem.write_to_path(str(key))
        return TlsFiles(certificate, key, self.authority)

    def replace(self, files: TlsFiles, identity: str) -> None:
        """Write what this authority issues, and its own certificate, into another one's files."""
        renewed = self.issue(identity)
        for old, new in (
            (files.certificate, renewed.certificate),
            (files.key, renewed.key),
            (files.authority, renewed.authority),
        ):
            assert old is not None
            assert new is not None
            old.write_bytes(new.read_bytes())

    def _with_uri(self, pem: bytes, identity: str) -> bytes:
        """Sign a certificate again with a URI as its name, which trustme does not know."""
        issued = x509.load_pem_x509_certificate(pem)
        authority = x509.load_pem_x509_certificate(self._authority.cert_pem.bytes())
        key = serialization.load_pem_private_key(self._authority.private_key_pem.bytes(), None)
        name = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity)])
        builder = x509.CertificateBuilder(
            issuer_name=authority.subject,
            subject_name=issued.subject,
            public_key=issued.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=issued.not_valid_before_utc,
            not_valid_after=issued.not_valid_after_utc,
        ).add_extension(name, critical=False)
        return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
