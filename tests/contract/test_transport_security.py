"""TLS, mTLS and roles, on a target with the whole chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from paceline.errors import ConnectionLostError, PermissionDeniedError
from paceline_serving.security import (
    AccessPolicy,
    TlsFiles,
    channel_credentials,
    refuse_plaintext,
    server_credentials,
)
from support.fake_host import FakeHost
from support.model_servers import TARGET, ModelClient, serving

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


@pytest.fixture
def certificates(tmp_path) -> Certificates:
    return Certificates(tmp_path)


def server_settings(files: TlsFiles, *, mutual: bool) -> dict[str, object]:
    settings: dict[str, object] = {
        "listen": "localhost:0",
        "tls_certificate": files.certificate,
        "tls_key": files.key,
    }
    if mutual:
        settings["tls_client_authority"] = files.authority
        settings["peer_roles"] = (f"{ORCHESTRATOR}=orchestrator", f"{CLIENT}=client")
    return settings


async def ask(process, files: TlsFiles | None) -> str:
    """Return the model's name, as a peer with these files."""
    client = ModelClient(
        TARGET, process.addresses["address"], credentials=channel_credentials(files)
    )
    try:
        return (await client.learn()).info.model_name
    finally:
        await client.channel.close()


async def test_a_tls_server_answers_whoever_trusts_it_and_nobody_in_plaintext(certificates):
    settings = server_settings(certificates.issue("localhost"), mutual=False)
    async with serving(TARGET, FakeHost(), **settings) as process:
        assert await ask(process, TlsFiles(authority=certificates.authority)) == "fake"
        with pytest.raises(ConnectionLostError):
            await ask(process, None)


async def test_a_client_refuses_a_server_of_another_authority(certificates, tmp_path):
    settings = server_settings(certificates.issue("localhost"), mutual=False)
    (tmp_path / "other").mkdir()
    other = Certificates(tmp_path / "other")
    async with serving(TARGET, FakeHost(), **settings) as process:
        with pytest.raises(ConnectionLostError):
            await ask(process, TlsFiles(authority=other.authority))


async def test_with_mtls_the_role_in_the_certificate_decides(certificates):
    settings = server_settings(certificates.issue("localhost"), mutual=True)
    async with serving(TARGET, FakeHost(), **settings) as process:
        assert await ask(process, certificates.issue(ORCHESTRATOR)) == "fake"
        for stranger in (CLIENT, "spiffe://paceline/nobody", "orchestrator.invalid"):
            with pytest.raises(PermissionDeniedError):
                await ask(process, certificates.issue(stranger))


async def test_with_mtls_nobody_without_a_certificate_gets_past_the_handshake(certificates):
    settings = server_settings(certificates.issue("localhost"), mutual=True)
    async with serving(TARGET, FakeHost(), **settings) as process:
        for files in (TlsFiles(authority=certificates.authority), None):
            with pytest.raises(ConnectionLostError):
                await ask(process, files)


async def test_with_mtls_and_no_roles_every_client_certificate_may_call(certificates):
    settings = server_settings(certificates.issue("localhost"), mutual=True) | {"peer_roles": ()}
    async with serving(TARGET, FakeHost(), **settings) as process:
        assert await ask(process, certificates.issue("spiffe://paceline/nobody")) == "fake"


async def test_a_renewed_certificate_is_used_without_a_restart(certificates, tmp_path):
    files = certificates.issue("localhost")
    (tmp_path / "new").mkdir()
    renewed_authority = Certificates(tmp_path / "new")
    async with serving(TARGET, FakeHost(), **server_settings(files, mutual=False)) as process:
        assert await ask(process, TlsFiles(authority=certificates.authority)) == "fake"
        renewed = renewed_authority.issue("localhost")
        files.certificate.write_bytes(renewed.certificate.read_bytes())
        files.key.write_bytes(renewed.key.read_bytes())
        assert await ask(process, TlsFiles(authority=renewed_authority.authority)) == "fake"


async def test_health_on_its_own_port_needs_no_certificate(certificates):
    settings = server_settings(certificates.issue("localhost"), mutual=True)
    async with (
        serving(TARGET, FakeHost(), **settings) as process,
        grpc.aio.insecure_channel(process.addresses["health_address"]) as channel,
    ):
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"", timeout=5) == b"\x08\x01"  # status: SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await channel.unary_unary("/paceline.v1.TargetService/Verify")(b"", timeout=5)


@pytest.mark.parametrize(
    ("service", "roles"),
    [
        ("paceline.v1.TargetService", {"orchestrator", "operator"}),
        ("paceline.v1.DrafterService", {"orchestrator", "operator"}),
        ("paceline.v1.ModelService", {"orchestrator", "operator"}),
        ("paceline.v1.OrchestratorService", {"client", "operator"}),
        ("grpc.health.v1.Health", {"client", "orchestrator", "operator"}),
        ("paceline.v1.Unheard", set()),
    ],
)
def test_each_role_may_call_what_the_table_says(service, roles):
    for role in ("client", "operator", "orchestrator"):
        policy = AccessPolicy({"spiffe://a/b": role})
        peer = {"peer_spiffe_id": [b"spiffe://a/b"]}
        if role in roles:
            policy.check(service, peer)
        else:
            with pytest.raises(PermissionDeniedError):
                policy.check(service, peer)
        with pytest.raises(PermissionDeniedError):
            policy.check(service, {})


def test_a_service_without_a_row_cannot_be_served():
    with pytest.raises(ValueError, match="has no row"):
        AccessPolicy.require_known(["paceline.v1.TargetService", "paceline.v1.New"])


def test_plaintext_to_another_machine_is_refused():
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/tmp/x"):
        refuse_plaintext(address, flag="--insecure")
    for address in ("10.0.0.1:1", "target-0:50051", "0.0.0.0:1", "[::]:1", "localhost.evil:1"):
        with pytest.raises(ValueError, match="--insecure"):
            refuse_plaintext(address, flag="--insecure")


def test_no_certificate_is_plaintext():
    assert server_credentials(TlsFiles()) is None
    assert channel_credentials(None) is None
