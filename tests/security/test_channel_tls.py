"""Who does not hold the token gets nothing: not one byte of a request or an answer passes."""

from __future__ import annotations

import asyncio
import datetime
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from tests.support.channel import a_client, a_request, a_source, a_token, run, serving, until
from tests.support.chaos import chaos

from warmseed.blocking import run_blocking
from warmseed.seeding.channel import tls
from warmseed.seeding.channel.client import SeedClient, new_instance
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.channel.errors import ChannelError, PeerRejected, PeerUnreachable
from warmseed.seeding.channel.frames import frame
from warmseed.seeding.channel.limits import ClientLimits, ServerLimits
from warmseed.seeding.channel.messages import FetchRequest, encode
from warmseed.seeding.channel.tls import ALPN, client_context, server_context, server_name
from warmseed.seeding.trust.token import TLS_CA_LABEL, Token

# What the plaintext protocol of stock vLLM sends; with a token that once ended its listener for good.
PLAINTEXT = struct.pack("!Q", 60) + '{"kind":"flashinfer_autotune","token":"é"}'.encode().ljust(60)

HASTY = ClientLimits(handshake_seconds=2, answer_seconds=2, reconnects=1, reconnect_seconds=0.01)


async def _with_context(token: Token, context: ssl.SSLContext) -> SeedClient:
    client = await a_client(token, limits=HASTY)
    client._identities = ((server_name(token.key_id), context),)
    return client


def test_another_token_is_rejected_at_both_ends_and_no_question_is_asked() -> None:
    async def main() -> None:
        source = a_source()
        client = await a_client(a_token(), limits=HASTY)
        async with serving(source, [a_token()]) as (server, peer):
            with pytest.raises(PeerRejected, match="does not hold our token"):
                await client.describe(peer, a_request(client))
            await until(lambda: server.stats.rejected == 1)
        assert source.requests == []

    run(main())


def test_the_source_rejects_a_client_that_only_pretends_to_know_the_token() -> None:
    """A client that skips the check of the source gets through its own half of TLS 1.3, and no further."""

    async def main() -> None:
        source, token, other = a_source(), a_token(), a_token()
        context = await run_blocking(client_context, other)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        client = await _with_context(token, context)
        async with serving(source, [token]) as (server, peer):
            with pytest.raises(PeerRejected):
                await client.describe(peer, a_request(client))
            await until(lambda: server.stats.rejected == 1)
        assert source.requests == []

    run(main())


def test_no_certificate_is_no_entry() -> None:
    async def main() -> None:
        source, token = a_source(), a_token()
        context = await run_blocking(client_context, token)
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.set_alpn_protocols([ALPN])
        bare.check_hostname = False
        bare.verify_mode = ssl.CERT_NONE
        assert context.cert_store_stats()["x509_ca"] == 1
        client = await _with_context(token, bare)
        async with serving(source, [token]) as (server, peer):
            with pytest.raises(PeerRejected):
                await client.describe(peer, a_request(client))
            await until(lambda: server.stats.rejected == 1)
        assert source.requests == []

    run(main())


@pytest.mark.parametrize(
    ("protocol", "reason"),
    [(ssl.PROTOCOL_TLS_SERVER, "a listener's certificate shown by a client")],
)
def test_a_certificate_of_the_other_role_is_rejected(
    protocol: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what one end shows could be reflected at it: both ends hold the same CA."""

    async def main() -> None:
        source, token = a_source(), a_token()
        real = tls._leaf_certificate
        swapped = {
            ExtendedKeyUsageOID.CLIENT_AUTH: ExtendedKeyUsageOID.SERVER_AUTH,
            ExtendedKeyUsageOID.SERVER_AUTH: ExtendedKeyUsageOID.CLIENT_AUTH,
        }
        async with serving(source, [token]) as (server, peer):
            monkeypatch.setattr(tls, "_leaf_certificate", lambda a, n, k, h, role: real(a, n, k, h, swapped[role]))
            wrong_client = await a_client(token, limits=HASTY)
            with pytest.raises(PeerRejected):
                await wrong_client.describe(peer, a_request(wrong_client))
            await until(lambda: server.stats.rejected == 1)
        async with serving(source, [token]) as (_, wrong_server):
            monkeypatch.setattr(tls, "_leaf_certificate", real)
            client = await a_client(token, limits=HASTY)
            with pytest.raises(PeerRejected, match="does not hold our token"):
                await client.describe(wrong_server, a_request(client))
        assert source.requests == []

    run(main())


def test_a_certificate_with_another_name_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        token = a_token()
        real = tls._leaf_certificate
        monkeypatch.setattr(
            tls, "_leaf_certificate", lambda a, n, k, h, role: real(a, n, k, "elsewhere.warmseed.internal", role)
        )
        async with serving(a_source(), [token]) as (_, peer):
            monkeypatch.setattr(tls, "_leaf_certificate", real)
            client = await a_client(token, limits=HASTY)
            with pytest.raises(PeerRejected):
                await client.describe(peer, a_request(client))

    run(main())


def test_without_the_agreed_protocol_name_neither_end_goes_on() -> None:
    async def main() -> None:
        source, token = a_source(), a_token()
        for protocols in ([], ["http/1.1"], ["warmseed/2"]):
            context = await run_blocking(client_context, token)
            context.set_alpn_protocols(protocols)
            client = await _with_context(token, context)
            async with serving(source, [token]) as (server, peer):
                with pytest.raises(PeerRejected, match=ALPN):
                    await client.describe(peer, a_request(client))
                await until(lambda seen=server: seen.stats.rejected == 1)  # type: ignore[misc]
        assert source.requests == []

    run(main())


def test_the_listener_checks_the_protocol_name_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        source, token = a_source(), a_token()
        context = await run_blocking(client_context, token)
        context.set_alpn_protocols([])
        client = await _with_context(token, context)
        monkeypatch.setattr("warmseed.seeding.channel.client.check_alpn", lambda _: None)
        async with serving(source, [token]) as (server, peer):
            with pytest.raises(PeerRejected):
                await client.describe(peer, a_request(client))
            await until(lambda: server.stats.rejected == 1)
        assert source.requests == []

    run(main())


def test_tls_1_2_is_not_spoken() -> None:
    async def main() -> None:
        token = a_token()
        context = await run_blocking(client_context, token)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        client = await _with_context(token, context)
        async with serving(a_source(), [token]) as (server, peer):
            with pytest.raises(ChannelError):
                await client.describe(peer, a_request(client))
            await until(lambda: server.stats.rejected >= 1)

    run(main())


@pytest.mark.parametrize(
    "greeting", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"x" * 99, b"\0" * 64]
)
def test_what_is_not_tls_is_closed_at_once(greeting: bytes) -> None:
    async def main() -> None:
        token = a_token()
        async with serving(a_source(), [token]) as (server, peer):
            reader, writer = await asyncio.open_connection(peer.host, peer.port)
            writer.write(greeting)
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
            assert server.lobby is not None
            assert server.lobby.garbage == 1
            assert server.stats.rejected == 0  # OpenSSL never saw it

    run(main(), seconds=4)


def test_a_recorded_session_played_again_is_not_understood() -> None:
    async def main() -> None:
        source, token = a_source(), a_token()
        client = await a_client(token)
        async with serving(source, [token]) as (server, peer), chaos(peer) as proxy:
            assert await client.describe(proxy.endpoint, a_request(client)) is not None
            _, writer = await asyncio.open_connection(peer.host, peer.port)
            writer.write(proxy.sent_to_source[0])
            await until(lambda: server.stats.rejected == 1)
            writer.close()
        assert len(source.requests) == 1

    run(main())


@asynccontextmanager
async def a_middleman(context: ssl.SSLContext) -> AsyncIterator[tuple[Endpoint, list[bytes]]]:
    """Ends TLS with a certificate of its own and would read what comes."""
    read: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        read.append(await reader.read(1))
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield Endpoint(*server.sockets[0].getsockname()[:2]), read
    finally:
        server.close()


def test_a_middleman_with_a_certificate_of_its_own_is_not_asked_anything() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token, limits=HASTY)
        context = await run_blocking(server_context, [a_token()])
        async with a_middleman(context) as (endpoint, read):
            with pytest.raises(PeerRejected, match="does not hold our token"):
                await client.describe(endpoint, a_request(client))
            assert read == []

    run(main())


def test_a_ca_that_copies_our_name_is_not_ours() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token, limits=HASTY)
        context = await run_blocking(_forged_context, token.key_id)
        async with a_middleman(context) as (endpoint, read):
            with pytest.raises(PeerRejected, match="does not hold our token"):
                await client.describe(endpoint, a_request(client))
            assert read == []

    run(main())


def _forged_context(key_id: str) -> ssl.SSLContext:
    authority = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"warmseed {key_id}")])
    key = Ed25519PrivateKey.generate()
    leaf = tls._leaf_certificate(
        authority, name, key.public_key(), server_name(key_id), ExtendedKeyUsageOID.SERVER_AUTH
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols([ALPN])
    tls._load_chain(context, [leaf], key)
    return context


def test_sessions_are_never_resumed() -> None:
    """A ticket would outlive the token's removal, and removing the token is the only revocation."""

    async def main() -> None:
        token = a_token()
        context = await run_blocking(client_context, token)
        async with serving(a_source(), [token]) as (_, peer):
            reader, writer = await asyncio.open_connection(
                peer.host, peer.port, ssl=context, server_hostname=server_name(token.key_id)
            )
            writer.write(frame(encode(FetchRequest(instance=new_instance(), sha256="00" * 32, offset=0)), limit=1024))
            assert await reader.readexactly(4)  # tickets would have come before this
            session = writer.get_extra_info("ssl_object").session
            assert session is None or not session.has_ticket
            writer.transport.abort()

    run(main())


def test_certificates_hold_at_any_clock_and_the_ca_signs_leaves_only() -> None:
    token = a_token()
    authority = Ed25519PrivateKey.from_private_bytes(token.derive(TLS_CA_LABEL))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    root = tls._root_certificate(authority, name)
    leaf = tls._leaf_certificate(authority, name, authority.public_key(), "x.internal", ExtendedKeyUsageOID.CLIENT_AUTH)
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    for certificate in (root, leaf):
        assert certificate.not_valid_before_utc <= epoch
        assert certificate.not_valid_after_utc.year == 9999
    assert tls._root_certificate(authority, name) == root
    constraints = root.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value == x509.BasicConstraints(ca=True, path_length=0)


def test_two_processes_have_leaves_of_their_own() -> None:
    async def main() -> None:
        token = a_token()
        shown = []
        for _ in range(2):
            async with serving(a_source(), [token]) as (_, peer):
                context = await run_blocking(client_context, token)
                _, writer = await asyncio.open_connection(
                    peer.host, peer.port, ssl=context, server_hostname=server_name(token.key_id)
                )
                shown.append(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
                writer.transport.abort()
        assert shown[0] != shown[1]

    run(main())


def test_no_public_ca_is_trusted() -> None:
    token = a_token()
    for context in (client_context(token), server_context([token])):
        assert context.cert_store_stats()["x509"] == 1
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3


def test_a_peer_that_never_answers_the_handshake_is_unreachable_in_time() -> None:
    async def main() -> None:
        token = a_token()
        limits = ClientLimits(handshake_seconds=0.3)
        client = await a_client(token, limits=limits)
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            with pytest.raises(PeerUnreachable, match=re.escape("0.3 s")):
                await client.describe(Endpoint(*silent.getsockname()), a_request(client))

    run(main(), seconds=4)


def test_the_handshake_has_a_limit_of_its_own() -> None:
    """A whole ClientHello and then silence."""

    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        limits = ServerLimits(handshake_seconds=0.3)
        async with serving(a_source(), [token], limits=limits) as (server, peer), chaos(peer) as proxy:
            assert await client.describe(proxy.endpoint, a_request(client)) is not None
            recorded = bytes(proxy.sent_to_source[0])
            hello = recorded[: 5 + int.from_bytes(recorded[3:5], "big")]
            reader, writer = await asyncio.open_connection(peer.host, peer.port)
            writer.write(hello)
            assert await reader.read(5)  # the listener's half
            await reader.read()
            assert server.stats.rejected == 1
            writer.close()

    run(main(), seconds=5)


def test_instances_are_as_random_as_secrets() -> None:
    assert new_instance() != new_instance()
    assert re.fullmatch("[0-9a-f]{64}", new_instance())
