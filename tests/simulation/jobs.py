"""The job of a seed: its nodes, the holders of each shard, and the steps of its training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from adaptor.protocol.messages import Share

# The number of nodes, and of ranks on each.
SIZES = [(1, 2), (1, 4), (2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (3, 4), (4, 1), (4, 2), (4, 3)]


@dataclass(frozen=True)
class Job:
    """One generation of workers.

    Attributes:
        nodes: the node of each rank.
        kind: the kind of replicas.
        groups: the ranks with common files, by group, in the order of names.
        shares: per rank: the reported shards.
        inner: per rank: the shards updated by each optimizer of the chain.
        copies: per rank: the mirrored shards of other ranks.
        partners: per rank: the ranks whose gradients the copies need.
        origin: the step before the first step of the training.
        steps: the steps of the training; some numbers are missing because the framework skips them entirely.
        skipped: steps without an update.
        late: whether a rank waits for the others after `end_step`, not at the end of the update.
        has_local_copy: whether each rank keeps a local copy of the state before an update, without a barrier.
    """

    nodes: tuple[int, ...]
    kind: str
    groups: dict[str, tuple[int, ...]]
    shares: tuple[tuple[Share, ...], ...]
    inner: tuple[tuple[tuple[tuple[str, int], ...], ...], ...]
    copies: tuple[tuple[tuple[str, int], ...], ...]
    partners: tuple[frozenset[int], ...]
    origin: int
    steps: tuple[int, ...]
    skipped: frozenset[int]
    late: bool
    has_local_copy: bool

    @property
    def ranks(self) -> range:
        return range(len(self.nodes))

    def updates(self, step: int) -> int:
        """Return the number of updates from the origin to `step`."""
        return sum(s <= step and s not in self.skipped for s in self.steps)

    def tensors(self, step: int) -> int:
        """Return the step of the last update up to `step`, which is the content of every shard."""
        return max((s for s in self.steps if s <= step and s not in self.skipped), default=self.origin)

    def record(self, step: int) -> tuple[int, int]:
        """Return the state of `step` besides tensors: the step, and the number of updates."""
        return step, self.updates(step)

    def size(self, group: str) -> int:
        return next(s.count for shares in self.shares for s in shares if s.group == group)

    def __str__(self) -> str:
        steps = ",".join(f"{step}{'s' * (step in self.skipped)}" for step in self.steps)
        shards = [
            "+".join(f"{s.group}.{s.index}{'' if s.can_write else 'f'}" for s in shares)
            for shares in self.shares
        ]
        kind = f"{self.kind}{' with local copies' * self.has_local_copy}"
        return f"{kind}, ranks on nodes {self.nodes}, shards {shards}, from step {self.origin}: {steps}"


def draw(random: Random) -> Job:
    """Draw a job of one to four nodes, data-parallel sizes 1 to 6, and one or two groups."""
    nodes, ranks_per_node = random.choice(SIZES)
    world = nodes * ranks_per_node
    models = random.choice([m for m in (1, 2) if world % m == 0 and world // m <= 6])
    size = world // models
    kinds = ["none"]
    if size > 1:
        kinds += ["mirror", "mirror", "plain"] + ["split"] * 3 * (size % 2 == 0) + ["experts"] * (models == 2)
    kind = random.choice(kinds)
    homes = tuple(rank // ranks_per_node for rank in range(world))
    names = [f"mp_{m}" for m in range(models)]
    shares, inner, copies, partners = [], [], [], []
    for rank in range(world):
        place, model = divmod(rank, models)
        ring = [homes[p * models + model] for p in range(size)]
        held_shards, updated_shards, copied_shards, partner = _holdings(kind, names, model, place, size, ring)
        shares.append(held_shards)
        inner.append(updated_shards)
        copies.append(copied_shards)
        partners.append(frozenset({rank, *(p * models + model for p in partner)}))
    origin = random.choice([0, 0, 40])
    steps = [origin + 1 + s for s in range(random.randint(2, 5))]
    if random.random() < 0.1 and len(steps) > 3:
        del steps[random.randrange(1, len(steps) - 1)]
    return Job(
        homes,
        kind,
        {name: tuple(range(m, world, models)) for m, name in enumerate(names)},
        tuple(shares),
        tuple(inner),
        tuple(copies),
        tuple(partners),
        origin,
        tuple(steps),
        frozenset(step for step in steps if random.random() < 0.15),
        random.random() < 0.3,
        random.random() < 0.3,
    )


def again(job: Job, origin: int, random: Random) -> Job:
    """Return the same job, restarted from step `origin`."""
    steps = tuple(origin + 1 + s for s in range(random.randint(2, 5)))
    skipped = frozenset(step for step in steps if random.random() < 0.15)
    return replace(job, origin=origin, steps=steps, skipped=skipped)


Shards = tuple[tuple[str, int], ...]


def _holdings(
    kind: str, names: list[str], model: int, place: int, size: int, ring: list[int]
) -> tuple[tuple[Share, ...], tuple[Shards, ...], Shards, list[int]]:
    """Return a rank's shares, shards by inner optimizer, copies, and the ring places of the copies."""
    name = names[model]
    if kind == "plain":  # no distributed optimizer: every rank has everything
        return (Share(name, 0, 1),), (((name, 0),),), (), []
    if kind == "split":
        half = size // 2
        return (Share(name, place % half, half),), (((name, place % half),),), (), []
    if kind == "mirror":
        distance = min(
            range(1, size), key=lambda s: (sum(ring[p] == ring[(p + s) % size] for p in range(size)), s)
        )
        source = (place - distance) % size
        shares = tuple(Share(name, index, size) for index in sorted({place, source}))
        return shares, (((name, place),),), ((name, source),), [source]
    if kind == "experts":
        # The dense optimizer is divided among the ranks of both groups; each group has its own experts.
        copies = size % 2 == 0
        dense = size // 2 if copies else size
        cut, expert = place % dense, dense + place % dense
        count = 2 * dense
        shares = tuple(
            sorted(
                [Share(n, cut, count, can_write=n == name) for n in names] + [Share(name, expert, count)],
                key=lambda share: (share.group, share.index),
            )
        )
        return shares, (tuple((n, cut) for n in names), ((name, expert),)), (), []
    return (Share(name, place, size),), (((name, place),),), (), []
