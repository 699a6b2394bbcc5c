"""The daemon-to-daemon channel: TLS 1.3 under a token both ends hold, one request a connection."""
