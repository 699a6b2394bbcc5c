"""Every bound of the channel, with its unit; `docs/channel.md` says what they add up to."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["ClientLimits", "ServerLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What a listener lets its peers, and strangers, take of it."""

    # Strangers, before TLS: each costs a file descriptor and no more.
    silent: int = 1024  # connections that have not yet sent a whole ClientHello; past it the oldest goes
    silent_per_address: int = 128  # the same, of one address (IPv6: of one /64)
    hello_seconds: float = 5.0  # from accept to a whole ClientHello
    # Connections with a ClientHello, waiting for their turn; still only a file descriptor and a task.
    queue: int = 2048
    queue_per_address: int = 512
    queue_seconds: float = 10.0
    # In the handshake: about 350 KiB each.
    handshakes: int = 64
    handshakes_per_address: int = 32
    handshake_seconds: float = 5.0
    handshake_grace: float = 1.0  # seconds that a handshake may take while others wait for its place
    # Authenticated: about 350 KiB each, and what they are being sent.
    sessions: int = 256
    request_seconds: float = 10.0  # to send the whole request
    turn_seconds: float = 20.0  # to wait for a turn; then the answer is "busy"
    busy_retry_seconds: float = 2.0  # what "busy" suggests
    descriptions: int = 8  # answered at once; each may hold one payload of at most 8 MiB
    streams: int = 8  # objects streamed at once; each holds one chunk
    source_seconds: float = 20.0  # for the source to find what was asked
    # Slow readers: a whole answer may take `answer_seconds` and its length at this rate.
    answer_seconds: float = 10.0
    description_rate: int = 64 << 10  # bytes per second
    stream_rate: int = 1 << 20  # bytes per second
    write_buffer: int = 256 << 10  # bytes of an answer inside our process that the peer has not taken yet

    def within(self, descriptors: int) -> ServerLimits:
        """These limits, lowered so that peers and strangers together take less than half of `descriptors`.

        Else a flood of connections would leave the daemon none to open its own files with.
        """
        share, small = max(descriptors // 8, 4), max(descriptors // 16, 2)
        return replace(
            self,
            silent=min(self.silent, share),
            queue=min(self.queue, share),
            sessions=min(self.sessions, share),
            handshakes=min(self.handshakes, small),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What a mirror lets one source take of its time; the caller's own budget comes on top."""

    connect_seconds: float = 5.0
    handshake_seconds: float = 15.0  # the source's own queue and its handshake
    answer_seconds: float = 45.0  # from the request to the head of the answer: its queue and its look-up
    transfer_seconds: float = 10.0  # on top of the length at the rates below
    description_rate: int = 64 << 10  # bytes per second
    stream_rate: int = 1 << 20  # bytes per second
    read_buffer: int = 256 << 10  # bytes of an answer inside our process that the caller has not taken yet
    reconnects: int = 5  # after a connection that the source dropped before the handshake, as a full one does
    reconnect_seconds: float = 0.2  # the first wait before that; doubled each time, with jitter
