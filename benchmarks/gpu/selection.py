"""How the tuner turns times into ranges of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from custom_ops.kernels.configs import FewConfig, GemmConfig, MlpConfig, RangeConfig
from custom_ops.kernels.spec import MAX_TOKENS

# A configuration may be this much slower than the fastest if it serves more token counts: each
# range has kernels of its own to compile, ship and load.
TOLERANCE = 0.02


def boundary(below: int, above: int) -> int:
    """Returns the last number of tokens of the lower range: the geometric middle."""
    return max(below, min(above - 1, math.isqrt(below * above)))


@dataclass(frozen=True)
class Part:
    """A launch by which configurations differ."""

    path: str  # of its RangeConfig
    product: str  # "up" for the first product or for both in one kernel, "down" for the second
    config: FewConfig | GemmConfig | MlpConfig

    @property
    def group(self) -> tuple[str, int]:
        """The path and the height of the tiles, which both products of a plan share."""
        return self.path, getattr(self.config, "block_m", 0)


def parts_of(config: RangeConfig) -> tuple[Part, ...]:
    """Returns the parts of a configuration."""
    down = () if config.down is None else (Part(config.path, "down", config.down),)
    return (Part(config.path, "up", config.up), *down)


def promising(times: Mapping[Part, float], count: int) -> list[RangeConfig]:
    """Returns the configurations whose parts are fastest, up to ``count`` of each group.

    Times of parts cannot be compared across groups: the rest of their plans differs.
    """

    def rank(parts: Iterable[Part]) -> tuple[float, str]:
        return sum(times[part] for part in parts), "".join(repr(part.config) for part in parts)

    found: list[RangeConfig] = []
    for group in dict.fromkeys(part.group for part in times):
        ups, downs = (
            sorted(
                ((part,) for part in times if part.group == group and part.product == wanted),
                key=rank,
            )[:count]
            for wanted in ("up", "down")
        )
        both = ups if group[0] == "mlp" else [up + down for up in ups for down in downs]
        for parts in sorted(both, key=rank)[:count]:
            path_and_configs: Any = (group[0], *(part.config for part in parts))
            found.append(RangeConfig(MAX_TOKENS, *path_and_configs))
    return found


def neighbours(
    times: Mapping[int, Mapping[RangeConfig, float]], count: int
) -> dict[int, set[RangeConfig]]:
    """Returns what else to time: the fastest few of the next lower and higher token counts."""
    tokens = sorted(times)
    best = {each: sorted(times[each], key=lambda c: (times[each][c], repr(c))) for each in tokens}
    found: dict[int, set[RangeConfig]] = {}
    for index, each in enumerate(tokens):
        near = [*tokens[max(0, index - 2) : index], *tokens[index + 1 : index + 3]]
        found[each] = {c for other in near for c in best[other][:count]} - set(times[each])
    return found


def choose_ranges(
    times: Mapping[int, Mapping[RangeConfig, float]], tolerance: float = TOLERANCE
) -> tuple[RangeConfig, ...]:
    """Chooses configurations and where their ranges end.

    As few ranges as serve every number of tokens within the tolerance of its fastest; among those
    that serve a range so, the one that is fastest on average.

    Args:
        times: Microseconds, by number of tokens and configuration, whose ``last_tokens`` is
            ignored. A configuration may be missing for some numbers of tokens.
        tolerance: How much longer than the fastest a range's configuration may take.

    Raises:
        ValueError: If there is no time for a number of tokens.
    """
    tokens = sorted(times)
    if not tokens or any(not times[count] for count in tokens):
        raise ValueError("every number of tokens needs a configuration that ran")
    chosen: list[RangeConfig] = []
    first = 0
    while first < len(tokens):
        serving, last = _within(times[tokens[first]], tolerance), first
        while last + 1 < len(tokens):
            both = serving & _within(times[tokens[last + 1]], tolerance)
            if not both:
                break
            serving, last = both, last + 1
        best = _fastest(serving, [times[count] for count in tokens[first : last + 1]])
        end = MAX_TOKENS if last + 1 == len(tokens) else boundary(tokens[last], tokens[last + 1])
        chosen.append(replace(best, last_tokens=end))
        first = last + 1
    return tuple(chosen)


def _within(times: Mapping[RangeConfig, float], tolerance: float) -> set[RangeConfig]:
    limit = (1 + tolerance) * min(times.values())
    return {config for config, time in times.items() if time <= limit}


def _fastest(
    configs: set[RangeConfig], times: Sequence[Mapping[RangeConfig, float]]
) -> RangeConfig:
    # repr breaks ties, so that equal times give equal tables.
    return min(configs, key=lambda c: (sum(math.log(each[c]) for each in times), repr(c)))
