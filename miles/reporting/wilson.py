"""Binomial confidence interval."""

import math


def wilson_interval(successes: float, count: int, *, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval (low, high) of a proportion; z = 1.96 covers 95 % (E. B. Wilson, 1927).

    `successes` may be fractional (a sum of scores in [0, 1], whose interval is then conservative).

    Raises:
        ValueError: `count` below 1 or `successes` outside 0..count.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if not -1e-9 <= successes <= count + 1e-9:
        raise ValueError(f"successes must lie in 0..{count}, got {successes}")
    share = min(max(successes / count, 0.0), 1.0)
    denominator = 1 + z * z / count
    centre = (share + z * z / (2 * count)) / denominator
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / denominator
    return max(0.0, centre - half), min(1.0, centre + half)
