"""Numbers as people read them: three digits, an error with one or two, powers of ten with a superscript."""

from __future__ import annotations

import math

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MINUS, TIMES, PLUS_MINUS = "\N{MINUS SIGN}", "\u2009×\u2009", "\u2009±\u2009"


def short(value: float, digits: int = 3) -> str:
    """Three digits.

    >>> short(0.012345), short(123456.0), short(-2.0), short(1.2e-7), short(0.0)
    ('0.0123', '123,000', '−2.00', '1.20\u2009×\u200910⁻⁷', '0')
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "∞"
    power = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if not -4 <= power < 6:
        return f"{_fixed(value / 10.0**power, digits - 1)}{TIMES}{ten(power)}"
    return _fixed(round(value, digits - 1 - power), max(0, digits - 1 - power))


def ten(power: int) -> str:
    """A power of ten.

    >>> ten(-3)
    '10⁻³'
    """
    return "10" + str(power).translate(SUPERSCRIPTS)


def with_error(value: float, error: float) -> str:
    """As many digits as the error allows, of which one is shown (two where it begins with a 1).

    >>> with_error(1.2345, 0.0123), with_error(0.5, 0.0), with_error(12345.0, 300.0), with_error(3.1e-7, 2e-8)
    ('1.234\u2009±\u20090.012', '0.500', '12,300\u2009±\u2009300', '(3.1\u2009±\u20090.2)\u2009×\u200910⁻⁷')
    """
    if not error or not math.isfinite(error):
        return short(value)
    size = math.floor(math.log10(max(abs(value), error)))
    scale = 0 if -4 <= size < 6 else size
    value, error = value / 10.0**scale, error / 10.0**scale
    places = -math.floor(math.log10(error)) + (1 if f"{error:e}".startswith("1") else 0)
    text = f"{_fixed(round(value, places), max(places, 0))}{PLUS_MINUS}{_fixed(round(error, places), max(places, 0))}"
    return f"({text}){TIMES}{ten(scale)}" if scale else text


def percent(value: float, error: float = 0.0) -> str:
    """A share.

    >>> [" ".join(percent(x).split()) for x in (0.1234, 0.0123, 0.00012)]
    ['12 %', '1.2 %', '0.01 %']
    """
    if error:
        return f"{with_error(100 * value, 100 * error)}\N{NO-BREAK SPACE}%"
    places = 0 if abs(value) >= 0.095 else (1 if abs(value) >= 0.0095 else 2)
    return f"{_fixed(100 * value, places)}\N{NO-BREAK SPACE}%"


def times(ratio: float) -> str:
    """A factor.

    >>> times(2.345), times(120.0)
    ('2.3×', '120×')
    """
    return f"{_fixed(ratio, 1 if ratio < 10 else 0)}×" if ratio < 1e6 else f"{short(ratio, 2)}×"


def _fixed(value: float, places: int) -> str:
    return f"{value:,.{places}f}".replace("-", MINUS)
