"""Which measurements a profile takes. A group is what takes turns with each other in one place on one state."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks import rivals
from benchmarks.codec import CODECS
from benchmarks.rivals.base import FOLDER, S3

QUARTER, ONE, FOUR = 256, 1024, 4096  # MiB
ALONE = ("latest", "prune", "gc")


@dataclass(frozen=True)
class Group:
    """Some rivals that take turns.

    Attributes:
        works: done one after the other by each rival in its turn; what needs something saved follows ``save``.
        mib: the size of the state; for works on big repositories, the number of epochs.
        rounds: how often each is measured; one more round goes before and does not count.
        versus: another state that each rival takes on right after ``state``, so that both can be compared.
    """

    works: tuple[str, ...]
    where: str
    state: str
    mib: int
    rivals: tuple[str, ...]
    rounds: int
    versus: str = ""

    @property
    def states(self) -> tuple[str, ...]:
        """The states of a turn."""
        return (self.state, self.versus) if self.versus else (self.state,)


def only(groups: list[Group], works: list[str], states: list[str], names: list[str], where: list[str]) -> list[Group]:
    """The part of a profile that was asked for; an empty list asks for all. ckptstore always takes part."""
    found = []
    for group in groups:
        kept = tuple(work for work in group.works if not works or work in works or (work == "save" and _needs(works)))
        taking = tuple(
            name for name in group.rivals if not names or name == "ckptstore" or any(n in name for n in names)
        )
        fits = (not states or {*group.states} & {*states}) and (not where or group.where in where)
        if fits and set(kept) & set(works or kept) and taking:
            found.append(replace(group, works=kept, rivals=taking))
    return found


def sized(groups: list[Group], rounds: int | None, mib: int | None) -> list[Group]:
    """The same groups with other rounds and sizes; groups that become equal are taken once."""
    changed = [
        replace(g, rounds=rounds or g.rounds, mib=g.mib if g.state == "epochs" else mib or g.mib) for g in groups
    ]
    return list(dict.fromkeys(changed))


def _needs(works: list[str]) -> bool:
    return bool({"restore", "restore cold", "partial"} & set(works))


def quick() -> list[Group]:
    """All goals, on states of 0.25 GiB, within ten minutes on two cores."""
    both = ("save", "restore")
    ours = ("ckptstore", "ckptstore, codec raw")
    s3 = ("ckptstore", "s3fs, 8 threads", "obstore, 8 threads")
    files = ("plain file", "torch.save + fsync", "torch DCP + fsync")
    return [
        Group(both, FOLDER, "adam", QUARTER, (*ours, *files), 3),
        Group(both, FOLDER, "dense-fp32", QUARTER, (*ours, "plain file"), 3),
        Group(("stall",), FOLDER, "adam", QUARTER, ("ckptstore", "torch DCP async", "memcpy"), 1),
        Group(("again",), FOLDER, "lora", QUARTER, ("ckptstore", "blake3"), 3),
        *(Group(("guards",), FOLDER, "adam", mib, ("ckptstore",), 1) for mib in (QUARTER, ONE)),
        Group(("codec",), "memory", "dense-fp32", 64, ("ckptstore", "ZipNN", "memcpy"), 1),
        Group(("codec",), "memory", "dense-bf16", 64, ("ckptstore", "ZipNN", "memcpy"), 1),
        Group(both, FOLDER, "small", 64, ("ckptstore",), 2, versus="one"),
        Group(("latest",), FOLDER, "epochs", 10_000, ("ckptstore",), 1),
        Group(both, FOLDER, "dense-fp32", ONE, ("ckptstore",), 1),
        Group(both, S3, "adam", QUARTER, (*s3, "torch DCP, FsspecWriter"), 2),
        Group(both, S3, "random", QUARTER, s3, 2),
    ]


def full() -> list[Group]:
    """All states, sizes and rivals."""
    return [*_folder(), *_repositories(), *_codecs(), *_s3()]


def _folder() -> list[Group]:
    def all_of(work: str) -> tuple[str, ...]:
        return tuple(rivals.chosen(work, FOLDER))

    every = ("save", "restore", "restore cold", "partial")
    both = ("save", "restore")
    durable = tuple(name for name in all_of("save") if rivals.ALL[name].durable)
    mine = ("ckptstore", "ckptstore, codec raw", "plain file")
    # With 100,000 arrays DCP takes half a minute and Orbax several for a single save or restore: left out.
    quick_with_many = tuple(name for name in durable if "DCP" not in name and "Orbax" not in name)
    groups = [
        Group(every, FOLDER, "adam", QUARTER, all_of("save"), 5),
        Group(both, FOLDER, "dense-fp32", QUARTER, all_of("save"), 5),
        *(Group(both, FOLDER, state, QUARTER, durable, 5) for state in ("dense-bf16", "sparse", "random")),
        Group(both, FOLDER, "small", QUARTER, quick_with_many, 3, versus="one"),
        Group(both, FOLDER, "lora", QUARTER, durable, 3),
    ]
    groups += [Group(both, FOLDER, state, ONE, durable, 3) for state in ("adam", "dense-fp32")]
    groups += [Group(both, FOLDER, state, FOUR, mine, 2) for state in ("adam", "dense-fp32")]
    for state, mib, rounds in (("adam", QUARTER, 5), ("dense-fp32", ONE, 3)):
        groups.append(Group(("stall",), FOLDER, state, mib, all_of("stall"), rounds))
    groups += [Group(("again",), FOLDER, "lora", mib, all_of("again"), 5) for mib in (QUARTER, ONE)]
    groups += [Group(("guards",), FOLDER, state, QUARTER, ("ckptstore",), 1) for state in ("adam", "dense-fp32")]
    groups.append(Group(("guards",), FOLDER, "adam", ONE, ("ckptstore",), 1))
    return [*groups, Group(("again",), FOLDER, "dense-fp32", QUARTER, all_of("again"), 3)]


def _repositories() -> list[Group]:
    alone = ("ckptstore",)
    return [
        *(Group(("latest",), where, "epochs", 10_000, alone, 3) for where in (FOLDER, S3)),
        *(Group((work,), FOLDER, "epochs", 1_000, alone, 1) for work in ("prune", "gc")),
        *(Group((work,), S3, "epochs", 200, alone, 1) for work in ("prune", "gc")),
    ]


def _codecs() -> list[Group]:
    states = ("dense-fp32", "dense-bf16", "adam", "sparse", "random")
    return [Group(("codec",), "memory", state, QUARTER, tuple(CODECS), 3) for state in states]


def _s3() -> list[Group]:
    both = ("save", "restore")
    every = tuple(rivals.chosen("save", S3))
    raw = ("ckptstore", "ckptstore, codec raw", "s3fs, 8 threads", "obstore, 8 threads")
    return [
        Group(both, S3, "adam", QUARTER, every, 5),
        Group(both, S3, "random", QUARTER, raw, 5),
        Group(both, S3, "dense-fp32", QUARTER, raw, 3),
        Group(both, S3, "dense-fp32", ONE, raw, 2),
        Group(both, S3, "dense-fp32", FOUR, ("ckptstore",), 1),
        Group(("again",), S3, "lora", QUARTER, tuple(rivals.chosen("again", S3)), 3),
    ]


def dcp() -> list[Group]:
    """torch DCP with our writer and reader beside others, on one rank and on four."""
    found = []
    for state in ("adam on 1 rank", "adam on 4 ranks"):
        files = ("ckptstore", "ckptstore, codec raw", "FileSystemWriter + fsync", "write + fsync")
        servers = ("ckptstore", "FsspecWriter", "s3torchconnector", "obstore, 8 threads")
        found.append(Group(("save", "restore"), FOLDER, state, QUARTER, files, 5))
        found.append(Group(("save", "restore"), S3, state, QUARTER, servers, 3))
        found.append(Group(("stall",), FOLDER, state, QUARTER, ("ckptstore", "FileSystemWriter + fsync", "memcpy"), 3))
        found.append(Group(("stall",), S3, state, QUARTER, ("ckptstore", "FsspecWriter"), 2))
    return found


PROFILES = {"quick": quick, "full": full, "dcp": dcp}
