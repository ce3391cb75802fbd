"""Which engine answers which prompt: longest expected first, so that engines finish together.

Groups are dealt to engines by expected cost. An engine starts with as many of its groups as it decodes at once: these
are its own, whoever is faster. What no engine has room for at the start is common: whichever engine has room takes the
longest that is left (a shared counter; nobody coordinates), so an engine that is slow, or has drawn long completions,
leaves its remainder to the others. Where everything fits at once, which is the default, nothing is left to move, and
one engine cannot take what another would have started with; ``vllm_max_num_seqs`` below an engine's share trades
concurrency for balance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from colocate_rl.balance import deal
from colocate_rl.placement import split_evenly


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt as all ranks together want it."""

    index: int
    token_ids: tuple[int, ...]
    num_copies: int


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive copies of one group, answered by one engine in one request."""

    group: int
    """Position in the list of groups."""
    first_copy: int
    num_copies: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All parts of a generation batch, and who may answer them."""

    parts: list[Part]
    own: list[list[int]]
    """Of each engine, positions of the parts that are its own, longest expected first."""
    common: list[int]
    """Positions of the parts that any engine takes, longest expected first."""

    def of(self, engine: int) -> list[int]:
        """Positions of all parts that ``engine`` may answer: its own, then the common ones."""
        return [*self.own[engine], *self.common]


def plan(copies: Sequence[int], costs: Sequence[float], num_engines: int, capacity: int | None = None) -> Plan:
    """Decides which engine answers which copies of which group.

    Whole groups go to one engine (it prefills the prompt once); engines get even numbers and costs of them. With fewer
    groups than engines the copies are spread instead, so that no engine idles while there is work.

    Args:
        copies: copies wanted of each group.
        costs: expected cost of each group.
        num_engines: K.
        capacity: completions that each engine decodes at once; None: every group is some engine's own.
    """
    if len(copies) < num_engines:
        return _spread(copies, num_engines)
    parts = [Part(group, 0, count) for group, count in enumerate(copies) if count]
    room = [len(span) for span in split_evenly(len(parts), num_engines)]
    shares = deal([costs[part.group] for part in parts], room)
    if capacity is None or num_engines == 1:
        return Plan(parts, shares, [])
    own = [_fitting(share, parts, capacity) for share in shares]
    common = [position for share, first in zip(shares, own, strict=True) for position in share[len(first) :]]
    common.sort(key=lambda position: (-costs[parts[position].group], position))
    return Plan(parts, own, common)


def _fitting(share: Sequence[int], parts: Sequence[Part], capacity: int) -> list[int]:
    """The first parts of a share that run at the same time; at least one."""
    first: list[int] = []
    room = capacity
    for position in share:
        room -= parts[position].num_copies
        if first and room < 0:
            break
        first.append(position)
    return first


def _spread(copies: Sequence[int], num_engines: int) -> Plan:
    rows = [(group, copy) for group, count in enumerate(copies) for copy in range(count)]
    parts: list[Part] = []
    own: list[list[int]] = []
    for span in split_evenly(len(rows), num_engines):
        mine: dict[int, list[int]] = {}
        for position in span:
            group, copy = rows[position]
            mine.setdefault(group, []).append(copy)
        own.append(list(range(len(parts), len(parts) + len(mine))))
        parts += [Part(group, numbers[0], len(numbers)) for group, numbers in mine.items()]
    return Plan(parts, own, [])


class ExpectedLengths:
    """Expects a prompt's completions to be as long as its last ones, or as the average of all prompts."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}

    @property
    def known(self) -> dict[int, float]:
        """Mean length of the last completions of each prompt, by its index."""
        return dict(self._known)

    def take(self, known: Mapping[int, float]) -> None:
        """Expects what another one knew, and nothing else: a resumed run deals prompts as the unbroken one does."""
        self._known = dict(known)

    def note(self, index: int, lengths: Sequence[int]) -> None:
        """Remembers the lengths of a prompt's completions."""
        if lengths:
            self._known[index] = sum(lengths) / len(lengths)

    def costs(self, groups: Sequence[Group]) -> list[float]:
        """Tokens of each group, as expected: its prompt once, and its completions."""
        known = [self._known[group.index] for group in groups if group.index in self._known]
        usual = sum(known) / len(known) if known else 0.0
        return [len(group.token_ids) + group.num_copies * self._known.get(group.index, usual) for group in groups]
