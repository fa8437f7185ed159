"""Which launch of a job a process belongs to, so that the ranks of two of them never mix.

Two launches must never share a name, and the ranks of one must all have the same. What the environment tells is taken
only where it is known to be so:

* ``torchrun`` on one node: ``TORCHELASTIC_RUN_ID`` (a UUID where it was not given) and ``TORCHELASTIC_RESTART_COUNT``.
* ``torchrun`` on several nodes: ``TORCHELASTIC_RUN_ID``, as ``--rdzv-id`` gave it ("a unique job id"). Not the restart
  count: each agent counts for itself, and only the failures of its own workers. An agent ends its workers before it
  meets the others again.
* Slurm: ``SLURM_JOB_ID``, ``SLURM_STEP_ID`` and ``SLURM_RESTART_COUNT`` (requeued).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ckptstore.errors import InvalidArgumentError
from ckptstore.keys import MAX_RANK
from ckptstore.manifest import RankOf

TIMEOUT = 600.0

_GROUP = re.compile(r"[\x20-\x7e]{1,256}")


def rank_of(rank: object, world_size: object, group: object = None) -> RankOf | None:
    """What was given to a save: None where it is of one process.

    Raises:
        InvalidArgumentError: rank and world size make no sense, or there is no group and none can be found out.
    """
    if rank is None and world_size is None:
        if group is not None:
            raise InvalidArgumentError("group is for ranks: pass rank and world_size as well")
        return None
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size <= MAX_RANK + 1:
        raise InvalidArgumentError(
            f"rank must be 0 to world_size - 1, and world_size at most {MAX_RANK + 1}, not {rank!r} of {world_size!r}"
        )
    if world_size == 1:
        return None
    return RankOf(check_group(group), rank, world_size)


def check_group(group: object) -> str:
    """``group``, or what the environment tells. InvalidArgumentError if it is no name, or there is none."""
    if group is None:
        group = launch_of(os.environ)
    if group is None:
        raise InvalidArgumentError(
            "the ranks need a name in common that no other launch has: pass group=.., e.g. a UUID that rank 0 made and "
            "the launcher hands to all, or the job id with a count of its restarts (under torchrun on several nodes: "
            "--rdzv-id)"
        )
    if not isinstance(group, str) or not _GROUP.fullmatch(group):
        raise InvalidArgumentError(f"group must be 1 to 256 printable ASCII characters, not {str(group)[:80]!r}")
    return group


def launch_of(environ: Mapping[str, str]) -> str | None:
    """A name that all ranks of this launch have, and no other launch; None where the environment does not tell."""
    job, run = environ.get("SLURM_JOB_ID", ""), environ.get("TORCHELASTIC_RUN_ID", "")
    slurm = f"slurm {environ.get('SLURM_CLUSTER_NAME', '')} {job} restart {environ.get('SLURM_RESTART_COUNT', '0')}"
    if run in ("", "none"):  # the latter is the default of torchrun, which any number of jobs have
        return f"{slurm} step {environ.get('SLURM_STEP_ID', '')}" if job else None
    name = f"{slurm} torchrun {run}" if job else f"torchrun {run}"
    if environ.get("GROUP_WORLD_SIZE") == "1":
        return f"{name} restart {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return name
