"""gRPC channel and server options, each with the measurement that set it.

Three ends: the orchestrator's channel to a model server ("pod"), the pod's server, and the
orchestrator's server for clients. Keepalive on a channel and the ping policy of the server it talks
to belong together: a server drops a client that pings more often than it allows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import grpc

from paceline_serving.exchanging_channel import ExchangingChannel
from paceline_serving.interceptors import TracedChannel
from paceline_serving.renewed_channel import RenewedChannel

if TYPE_CHECKING:
    from paceline.credentials import Credentials

_Options = tuple[tuple[str, int], ...]

_MEBIBYTE = 1 << 20
_RECEIVED = "grpc.max_receive_message_length"
_STREAMS = "grpc.max_concurrent_streams"
_LEAST_STREAMS = 1024
_AGE_GRACE = "grpc.max_connection_age_grace_ms"

# 1024 draft tokens with 4096 entries each, of at most 3 + 4 bytes, are 28 MiB.
_POD_MESSAGE_BYTES = 32 * _MEBIBYTE

# The largest answer has 64 draft tokens with 4096 entries each: 1.8 MiB. Parsing holds up the event
# loop, 4 MiB for some 10 ms.
_POD_ANSWER_BYTES = 4 * _MEBIBYTE

# Between the soft and the hard limit gRPC rejects at random, so they are equal.
_METADATA_LIMITS: _Options = (
    ("grpc.max_metadata_size", 8192),
    ("grpc.absolute_max_metadata_size", 8192),
)

# What all servers allow: a ping every half a second, with calls or without, which costs nothing.
# gRPC's own limit is 5 minutes, and 2 hours without calls: a client that pings more often loses its
# connection, and the calls on it. After two pings beyond it it still does (ENHANCE_YOUR_CALM), so
# that a flood ends. Not "min_recv_ping_interval…", which gRPC ignores.
_PING_POLICY: _Options = (
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 2),
)

POD_CHANNEL_OPTIONS: _Options = (
    # A frozen pod is noticed after 1.6 s; without ping_timeout_ms it takes 60 s.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # A restarted pod is used again after 0.4 s; with the default backoff after 11 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Despite its name the limit of a connection attempt, TLS and the first HTTP/2 frame included.
    # With 100 ms a machine that was busy for a moment was a lost server. It also bounds how long a
    # SYN into a black hole is waited for: 5 s, so that it is repeated after 1, 3 and 5 s, not 7.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # Every attempt is the orchestrator's own, and counted.
    ("grpc.enable_retries", 0),
    ("grpc.max_send_message_length", _POD_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _POD_ANSWER_BYTES),
)

MOST_POD_CALLS = 4096
"""The most calls that run at once on a connection to a model server, or on a stream of calls."""

POD_SERVER_OPTIONS: _Options = (
    *_PING_POLICY,
    # A request has one call of each kind at a time here; `queue_limit` and `session_limit` refuse
    # with a time to come back, gRPC's core without a word.
    (_STREAMS, MOST_POD_CALLS),
    # An orchestrator watches health, so its connection is never idle; one that never calls is.
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.server_handshake_timeout_ms", 3000),
    # Two processes on one port would share its connections at random.
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", _POD_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _POD_MESSAGE_BYTES),
    *_METADATA_LIMITS,
)

CLIENT_SERVER_OPTIONS: _Options = (
    # The default of two hours would keep dead clients.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),
    *_PING_POLICY,
    (_STREAMS, 128),
    # An idle client does not keep a descriptor, and can connect again. Longer than the 60 s of
    # proxies, which would send a call in the same moment.
    ("grpc.max_connection_idle_ms", 75_000),
    # Connections have a largest age, so that clients meet new replicas within minutes: they connect
    # again, and calls on the old connection finish. The grace is the longest call's time; see
    # `client_server_options`.
    ("grpc.max_connection_age_ms", 300_000),
    (_AGE_GRACE, 600_000),
    ("grpc.server_handshake_timeout_ms", 5000),
    ("grpc.so_reuseport", 0),
    # An orchestrator's operator limits requests; an answer's statistics and timeline are larger
    # than most requests.
    (_RECEIVED, _MEBIBYTE),
    ("grpc.max_send_message_length", 16 * _MEBIBYTE),
    *_METADATA_LIMITS,
)

PROBE_SERVER_OPTIONS: _Options = (
    # A probe connects, asks and leaves. A silent connection holds one of few places, so it ends
    # after a second; a watching client connects again.
    *_PING_POLICY,
    ("grpc.server_handshake_timeout_ms", 1000),
    ("grpc.max_connection_idle_ms", 1000),
    ("grpc.max_connection_age_ms", 60_000),
    ("grpc.max_connection_age_grace_ms", 1000),
    ("grpc.max_concurrent_streams", 16),
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 4096),
    *_METADATA_LIMITS,
)


def connections_at_most(connections: int) -> _Options:
    """Limit a server's connections: gRPC refuses a further one at once."""
    return (("grpc.max_allowed_incoming_connections", connections),)


def client_server_options(
    *, request_limit: int, message_bytes: int, call_seconds: float
) -> _Options:
    """Return the options of a server for clients, by its limits of requests, bytes and time.

    gRPC itself refuses larger requests, unread. A connection that reached its largest age lasts for
    as long as a call may take, so that no call is cut.

    gRPC's core refuses streams beyond its limit without a reason (RST_STREAM, REFUSED_STREAM), and
    its own clients begin more than the server allows: of 200 at once, 70 beyond 128. So the limit
    of a connection is twice the server's limit of requests: a request too many gets an answer that
    says when to retry. A stream costs some kB, and waiting requests are limited in bytes as well.
    """
    return (
        *(it for it in CLIENT_SERVER_OPTIONS if it[0] not in {_STREAMS, _RECEIVED, _AGE_GRACE}),
        (_STREAMS, max(_LEAST_STREAMS, 2 * request_limit)),
        (_RECEIVED, message_bytes),
        (_AGE_GRACE, math.ceil(1000 * call_seconds)),
    )


def pod_channel(
    address: str,
    *,
    credentials: Credentials | None,
    tls_name: str | None = None,
    may_exchange: bool = True,
) -> grpc.aio.Channel:
    """Open the one long-lived channel to a model server: an `ExchangingChannel`.

    After a lost connection the next one uses the certificates of that time.

    Args:
        address: `host:port` or `unix:PATH`.
        credentials: From `security.channel_credentials`; None: plaintext.
        tls_name: The name in the server's certificate; None: the address's host.
        may_exchange: Whether calls may travel as messages of one stream.
    """
    options: list[tuple[str, int | str]] = [*POD_CHANNEL_OPTIONS]
    if tls_name:
        options.append(("grpc.ssl_target_name_override", tls_name))

    def open_secure(used: grpc.ChannelCredentials) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, used, options)

    channel = (
        grpc.aio.insecure_channel(address, POD_CHANNEL_OPTIONS)
        if credentials is None
        else RenewedChannel(open_secure, credentials)
    )
    return cast(
        "grpc.aio.Channel", ExchangingChannel(TracedChannel(channel), may_exchange=may_exchange)
    )
