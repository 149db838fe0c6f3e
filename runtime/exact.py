"""Cosine and sine that are the same bits on every host.

The C library's and numpy's differ between versions and processors; decimal arithmetic is rounded as its standard
says, everywhere. Slow, so only for tables and once a step.
"""

from __future__ import annotations

from decimal import Decimal, localcontext

DIGITS = 50
PI = Decimal("3.14159265358979323846264338327950288419716939937510")


def cosine_and_sine(angle: Decimal) -> tuple[Decimal, Decimal]:
    """(cos, sin) of an angle in radians, |angle| <= 4, to some 45 digits."""
    with localcontext() as context:
        context.prec = DIGITS
        sums = [Decimal(1), angle]  # the even terms of the exponential series, and the odd ones
        term, n = angle, 1
        while n < 8 or abs(term) > Decimal(10) ** -DIGITS:
            n += 1
            term = term * angle / n
            sums[n % 2] += term if n % 4 < 2 else -term
        return sums[0], sums[1]


def power(base: Decimal, exponent: Decimal) -> Decimal:
    """``base ** exponent`` for a positive base."""
    with localcontext() as context:
        context.prec = DIGITS
        return (exponent * base.ln()).exp()
