"""Whether 32 bytes are a sound Ed25519 public key.

OpenSSL verifies with any point that decodes. A point of small order "verifies" any message, so a keyring
must refuse one when it is loaded. The curve arithmetic is RFC 8032, section 5.1; it handles public values
only, once per key, so it need not be fast or constant in time.
"""

from __future__ import annotations

__all__ = ["in_prime_order_subgroup"]

_P = 2**255 - 19
_L = 2**252 + 27742317777372353535851937790883648493  # order of the base point
_D = -121665 * pow(121666, -1, _P) % _P
_SQRT_MINUS_1 = pow(2, (_P - 1) // 4, _P)

_Point = tuple[int, int, int, int]  # extended coordinates X, Y, Z, T
_NEUTRAL: _Point = (0, 1, 1, 0)


def _decompress(raw: bytes) -> _Point | None:
    y = int.from_bytes(raw, "little")
    sign, y = y >> 255, y & (1 << 255) - 1
    if y >= _P:
        return None
    x2 = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(x2, (_P + 3) // 8, _P)
    if (x * x - x2) % _P:
        x = x * _SQRT_MINUS_1 % _P
    if (x * x - x2) % _P or (x == 0 and sign):
        return None
    if x & 1 != sign:
        x = _P - x
    return x, y, 1, x * y % _P


def _add(p: _Point, q: _Point) -> _Point:
    a = (p[1] - p[0]) * (q[1] - q[0]) % _P
    b = (p[1] + p[0]) * (q[1] + q[0]) % _P
    c = 2 * p[3] * q[3] * _D % _P
    d = 2 * p[2] * q[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _is_neutral(p: _Point) -> bool:
    return p[0] % _P == 0 and (p[1] - p[2]) % _P == 0


def in_prime_order_subgroup(raw: bytes) -> bool:
    """Whether `raw` is the canonical encoding of a point of order exactly L, as every honest public key is."""
    point = _decompress(raw) if len(raw) == 32 else None
    if point is None or _is_neutral(point):
        return False
    total, power, scalar = _NEUTRAL, point, _L
    while scalar:
        if scalar & 1:
            total = _add(total, power)
        power = _add(power, power)
        scalar >>= 1
    return _is_neutral(total)
