import grpc
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from paceline import AsyncClient, Tls, errors
from paceline.channel import is_loopback
from support.fake_orchestrator import FakeOrchestrator, serving


@pytest.mark.parametrize(
    "address",
    ["localhost:1", "127.0.0.1:1", "127.8.0.1:1", "[::1]:1", "unix:/tmp/x", "ipv4:127.0.0.1:1",
     "dns:///localhost:1", "ipv4:127.0.0.1:1,127.0.0.1:2"],
)  # fmt: skip
def test_these_are_on_this_machine(address):
    assert is_loopback(address)


@pytest.mark.parametrize(
    "address",
    ["example.com:1", "10.0.0.1:1", "0.0.0.0:1", "dns:///example.com:1", "localhost.example:1",
     "ipv4:127.0.0.1:1,10.0.0.1:1", "127.0.0.1.example:1", "example.127.0.0.1:1", "127.1:1",
     "localhost.:1", "LOCALHOST.example:1", "evil-localhost:1", "localhost@example.com:1",
     "127.0.0.1@example.com:1", "[::1].example:1", "[::ffff:10.0.0.1]:1", "2130706433:1",
     "unix.example:1", "localhost:1,example.com:1", "dns:///127.0.0.1.example:1"],
)  # fmt: skip
def test_these_are_elsewhere(address):
    assert not is_loopback(address)


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", "localhost:http", ":1"])
def test_an_address_needs_host_and_port(address):
    with pytest.raises(errors.InvalidFieldError, match="HOST:PORT"):
        is_loopback(address)


async def test_plaintext_off_this_machine_must_be_allowed():
    with pytest.raises(errors.InvalidFieldError, match="option insecure"):
        AsyncClient("example.com:443")
    await AsyncClient("example.com:443", insecure=True).close()


async def test_a_missing_certificate_file_is_named(tmp_path):
    with pytest.raises(errors.InvalidFieldError, match="nowhere"):
        AsyncClient("localhost:1", tls=Tls(ca_file=tmp_path / "nowhere.pem"))
    with pytest.raises(errors.InvalidFieldError, match="belong together"):
        AsyncClient("localhost:1", tls=Tls(certificate_file=tmp_path / "a.pem"))


def test_a_key_with_a_password_is_refused_without_asking_for_it(tmp_path):
    user = trustme.CA().issue_cert("user@localhost")
    key = serialization.load_pem_private_key(user.private_key_pem.bytes(), None)
    secret = serialization.BestAvailableEncryption(b"secret")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (tmp_path / "key.pem").write_bytes(key.private_bytes(pem, pkcs8, secret))
    user.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    tls = Tls(certificate_file=tmp_path / "cert.pem", key_file=tmp_path / "key.pem")
    with pytest.raises(errors.InvalidFieldError, match="no usable certificate and key"):
        AsyncClient("localhost:1", tls=tls)


async def test_mutual_tls_lets_in_who_has_a_certificate(tmp_path):
    authority = trustme.CA()
    server, user = authority.issue_cert("localhost"), authority.issue_cert("user@localhost")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    user.private_key_pem.write_to_path(tmp_path / "key.pem")
    user.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    credentials = grpc.ssl_server_credentials(
        [(server.private_key_pem.bytes(), server.cert_chain_pems[0].bytes())],
        root_certificates=authority.cert_pem.bytes(),
        require_client_auth=True,
    )
    trusting = Tls(ca_file=tmp_path / "ca.pem", server_name="localhost")
    trusted = Tls(
        ca_file=tmp_path / "ca.pem",
        certificate_file=tmp_path / "cert.pem",
        key_file=tmp_path / "key.pem",
        server_name="localhost",
    )
    async with serving(FakeOrchestrator(), credentials) as fake:
        async with AsyncClient(fake.address, tls=trusted) as client:
            assert (await client.info()).model_name == "fake"
        from_memory = Tls(
            ca=authority.cert_pem.bytes(),
            certificate=user.cert_chain_pems[0].bytes(),
            key=user.private_key_pem.bytes(),
            server_name="localhost",
        )
        assert "PRIVATE KEY" not in repr(from_memory)
        async with AsyncClient(fake.address, tls=from_memory) as client:
            assert (await client.info()).model_name == "fake"
        async with AsyncClient(fake.address, tls=trusting) as client:
            with pytest.raises(errors.ConnectionLostError):
                await client.info()


@pytest.mark.parametrize(
    ("tls", "field"),
    [
        (Tls(ca=b"no PEM"), "tls.ca"),
        (Tls(ca=b"x", ca_file="there"), "tls.ca"),
        (Tls(ca="a/path"), "tls.ca"),
        (Tls(certificate=b"x"), "tls"),
        (Tls(certificate=b"x", key=b"secret"), "tls.certificate"),
    ],
)
def test_tls_from_memory_that_is_unusable_is_refused_and_never_shown(tls, field):
    with pytest.raises(errors.InvalidFieldError) as caught:
        AsyncClient("localhost:1", tls=tls)
    assert caught.value.violations[0].field == field
    assert "secret" not in str(caught.value)


async def test_a_channels_own_options_win_over_ours(fake):
    fake.script = []
    options = [("grpc.max_receive_message_length", 5)]
    async with AsyncClient(fake.address, channel_options=options) as client:
        with pytest.raises(errors.InvalidFieldError, match="larger than max"):
            await client.generate("x").text()
