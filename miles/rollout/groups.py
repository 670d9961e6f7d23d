"""Groups of samples for rollouts: which prompts come next, what is left over, and which groups are kept."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles.data.prompts import PromptRow, PromptSource
from miles.data.sample import Sample, SampleStatus

Group = list[Sample]


class GroupSource:
    """Endless stream of groups: the samples of one prompt each, numbered in the order of the prompts.

    Every prompt of an epoch is handed out once. Groups that a rollout sampled and did not train on are put back and
    handed out first. Position and leftover groups are the state; a source that loads it continues exactly there.
    """

    def __init__(self, prompts: PromptSource, *, samples_per_prompt: int) -> None:
        self._prompts = prompts
        self._samples_per_prompt = samples_per_prompt
        self._next_group = 0
        self._leftover: list[Group] = []

    def new_groups(self, count: int, *, rollout_id: int) -> list[Group]:
        """The next `count` prompts, to be sampled."""
        size = self._samples_per_prompt
        groups = []
        for number, (_, row) in enumerate(self._prompts.get(count), start=self._next_group):
            groups.append(
                [sample_of(row, index=number * size + m, group=number, rollout_id=rollout_id) for m in range(size)]
            )
        self._next_group += count
        return groups

    def take_leftover(self, count: int) -> list[Group]:
        """Up to `count` groups that were put back, oldest first."""
        taken, self._leftover = self._leftover[:count], self._leftover[count:]
        return taken

    @property
    def num_leftover(self) -> int:
        """Groups that were put back and not taken yet."""
        return len(self._leftover)

    def put_back(self, groups: Sequence[Group]) -> None:
        """Keep sampled groups for a later rollout."""
        self._leftover.extend(groups)

    def state_dict(self) -> dict[str, Any]:
        """JSON-safe; as large as the groups that are left over."""
        return {
            **self._prompts.state_dict(),
            "next_group": self._next_group,
            "leftover": [[sample.to_dict() for sample in group] for group in self._leftover],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            ValueError: the prompts are not what they were.
        """
        self._prompts.load_state_dict(state)
        self._next_group = int(state["next_group"])
        self._leftover = [[Sample.from_dict(row) for row in group] for group in state["leftover"]]


def sample_of(row: PromptRow, *, index: int, group: int, rollout_id: int) -> Sample:
    """A sample of a prompt that waits for its response."""
    return Sample(
        index=index,
        group_index=group,
        rollout_id=rollout_id,
        prompt=row.prompt,
        tokens=list(row.tokens),
        label=row.label,
        metadata=dict(row.metadata or {}),
    )


@dataclass(frozen=True)
class Collected:
    """Groups of one rollout in the order of their prompts, and what became of the others."""

    groups: list[Group]
    num_sampled: int
    num_filtered: int
    num_left_over: int
    num_filled_up: int = 0


async def collect_groups(
    source: GroupSource,
    sample: Callable[[list[Sample]], Awaitable[None]],
    *,
    rollout_id: int,
    wanted: int,
    at_first: int,
    keep: Callable[[Group], Awaitable[bool]] | None = None,
    max_replacements: int = 0,
) -> Collected:
    """Sample groups until `wanted` of them are kept.

    Which groups are kept depends on their order alone, not on which was finished first: otherwise short responses
    would be preferred.

    Args:
        sample: generates and scores, in place.
        at_first: groups sampled at first for `wanted` missing ones, `wanted` or more; fewer in proportion where
            leftover groups cover some.
        keep: the filter; a group with a sample that has no reward is not asked about and never kept. None keeps all.
        max_replacements: groups sampled beyond the first ones, at most. Then filtered groups fill up, in their order.
    """
    kept = source.take_leftover(wanted)
    filtered: list[Group] = []
    ask = -(-(wanted - len(kept)) * at_first // wanted)
    num_sampled = replaced = 0
    while ask > 0:
        groups = source.new_groups(ask, rollout_id=rollout_id)
        await sample([member for group in groups for member in group])
        num_sampled += len(groups)
        for group in groups:
            scored = all(member.status is not SampleStatus.FAILED for member in group)
            (kept if keep is None or (scored and await keep(group)) else filtered).append(group)
        ask = max(0, min(wanted - len(kept), max_replacements - replaced))
        replaced += ask
    missing = max(0, wanted - len(kept))
    kept += filtered[:missing]
    filtered = filtered[missing:]
    kept.sort(key=lambda group: group[0].group_index)
    source.put_back(kept[wanted:])
    return Collected(kept[:wanted], num_sampled, len(filtered), len(kept[wanted:]), missing)
