"""What of a saved state is not finite, and where another copy was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Doubts:
    """Each group is doubted once: what other holders give then is written, whatever it is.

    A state that is not finite can be that of a training that has diverged, and is saved as it was; but a
    device that fails spoils only its own copy.

    ranks  by group, whose shards were doubted
    said   by group that is on disk, for the verdict; empty where nothing is to be said
    """

    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    def settle(self, group: str, holders: tuple[int, ...], not_finite: str) -> None:
        """`group` is on disk, from `holders`; `not_finite` says what there is not, empty where all is."""
        spoilt = " and ".join(str(rank) for rank in self.ranks.get(group, ()) if rank not in holders)
        if not_finite:
            self.said[group] = f"in {group} {not_finite}, as before the failure"
        elif spoilt:
            self.said[group] = f"what rank {spoilt} held of {group} was not finite, another copy is saved"
        else:
            self.said[group] = ""

    @property
    def words(self) -> str:
        """All that is to be said."""
        return "; ".join(filter(None, self.said.values()))
