"""TLS 1.3 with mutual certificates under a CA whose key both ends derive from the token.

Holding the token *is* holding the CA key, so a valid certificate proves the token without sending it.
Each process makes one leaf key per role, in memory; nothing is ever enrolled, renewed or written to disk.
Strangers are dealt with by OpenSSL alone, before any line of our protocol.
"""

from __future__ import annotations

import datetime
import os
import ssl
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from warmseed.errors import ConfigurationError
from warmseed.seeding.channel.errors import PeerRejected
from warmseed.seeding.trust.token import TLS_CA_LABEL, Token

__all__ = ["ALPN", "check_alpn", "client_context", "server_context", "server_name"]

ALPN = "warmseed/1"

# Open at both ends: a node whose clock stands at 1970 or in the next century must still be able to join.
# 1950 is the earliest date that X.509 writes; RFC 5280 4.1.2.5 names the latest as "no end".
_NOT_BEFORE = datetime.datetime(1950, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


def server_name(key_id: str) -> str:
    """The name that both ends' certificates carry, and by which a client picks its token at the server."""
    return f"{key_id}.seed.warmseed.internal"


def server_context(tokens: Sequence[Token]) -> ssl.SSLContext:
    """What a listener needs to serve the holders of any of `tokens`, and nobody else.

    A client names the token it means by the TLS server name. One that names none, or another, meets the
    first token's certificate: it can then say that the tokens differ, where a bare refusal would look
    like a lost connection.

    Raises:
        ConfigurationError: there is no token, or the platform can't keep a key off the disk.
    """
    if not tokens:
        raise ConfigurationError("a seed listener needs a token; start-up stops; make one with: warmseed token new")
    contexts = {server_name(token.key_id): _context(token, ssl.PROTOCOL_TLS_SERVER) for token in tokens}

    def pick(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        connection.context = contexts.get(name or "", first)

    first = next(iter(contexts.values()))
    first.sni_callback = pick
    return first


def client_context(token: Token) -> ssl.SSLContext:
    """What a client needs to reach holders of `token`; pass ``server_name(token.key_id)`` as the host name.

    Raises:
        ConfigurationError: the platform can't keep a key off the disk.
    """
    return _context(token, ssl.PROTOCOL_TLS_CLIENT)


def check_alpn(connection: ssl.SSLObject | ssl.SSLSocket | None) -> None:
    """Nothing, when both ends speak our protocol; Python does not fail a handshake that agreed on none.

    Raises:
        PeerRejected: another protocol, none, or no TLS at all.
    """
    agreed = None if connection is None else connection.selected_alpn_protocol()
    if agreed != ALPN:
        raise PeerRejected(f"the peer holds our token but does not speak {ALPN}")


def _context(token: Token, protocol: int) -> ssl.SSLContext:
    authority = Ed25519PrivateKey.from_private_bytes(token.derive(TLS_CA_LABEL))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"warmseed {token.key_id}")])
    root = _root_certificate(authority, name)
    server = protocol == ssl.PROTOCOL_TLS_SERVER
    # Never create_default_context: it would trust every public CA.
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=root.public_bytes(serialization.Encoding.PEM).decode("ascii"))
    context.set_alpn_protocols([ALPN])
    if server:
        # No tickets: a resumed session would outlive the token's removal, and rotation is our revocation.
        context.num_tickets = 0
    key = Ed25519PrivateKey.generate()
    role = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
    leaf = _leaf_certificate(authority, name, key.public_key(), server_name(token.key_id), role)
    _load_chain(context, (leaf, root), key)
    return context


def _root_certificate(authority: Ed25519PrivateKey, name: x509.Name) -> x509.Certificate:
    # Every holder builds the same bytes: same key, serial and dates, and Ed25519 signs deterministically.
    return (
        x509.CertificateBuilder(issuer_name=name, subject_name=name)
        .public_key(authority.public_key())
        .serial_number(1)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, None)
    )


def _leaf_certificate(
    authority: Ed25519PrivateKey, issuer: x509.Name, key: Ed25519PublicKey, name: str, role: x509.ObjectIdentifier
) -> x509.Certificate:
    return (
        x509.CertificateBuilder(issuer_name=issuer, subject_name=x509.Name([]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        # The role stops a certificate from being reflected at the process that made it.
        .add_extension(x509.ExtendedKeyUsage([role]), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, None)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _load_chain(context: ssl.SSLContext, chain: Sequence[x509.Certificate], key: Ed25519PrivateKey) -> None:
    """Hand certificates and a key to OpenSSL, which takes them from a file only, without touching a disk.

    The chain is given whole: of a leaf alone OpenSSL builds the rest anew in every handshake (0.1 ms at each end).
    """
    pem = b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in chain)
    pem += key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        memory = os.memfd_create("warmseed-leaf", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        raise ConfigurationError(f"the seed channel needs Linux memfd ({error}); start-up stops") from error
    with open(memory, "wb") as stream:
        stream.write(pem)
        stream.flush()
        context.load_cert_chain(f"/proc/self/fd/{stream.fileno()}")
