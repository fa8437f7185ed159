"""Arguments of the front door, checked before anything happens."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec

from ckptstore.errors import InvalidArgumentError, InvalidRecordError
from ckptstore.jsonsize import fits
from ckptstore.manifest import MAX_OBJECTS, MAX_RECORDS, check_record_name
from ckptstore.pipeline import cores
from ckptstore.policies import PerRecord, Policy
from ckptstore.tree import FlatState, flatten, leaf_paths

MAX_METADATA = 8 * 1024 * 1024
EXIT_TIMEOUT = 300.0
MAX_EXIT_TIMEOUT = 24 * 3600.0

WhenBusy = Literal["wait", "skip", "error"]

RUN_ID = "CKPTSTORE_RUN_ID"  # the variable of the environment that names the run where `open` was given no name

_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:/@+-]{0,127}")
_CODECS = ("auto", "raw", "max")
_WHEN_BUSY = ("wait", "skip", "error")
_ON_FULL = ("prune", "oldest", "raise")
_ON_ERROR = ("raise", "warn")


def check_policy(keep: object) -> Policy | PerRecord | None:
    """``keep``, if it is a policy or None, or a policy for each of some records. InvalidArgumentError otherwise."""
    if _is_mapping(keep) and keep and all(isinstance(policy, Policy) for policy in keep.values()):  # type: ignore[attr-defined]
        return PerRecord({check_record_name(name): policy for name, policy in keep.items()})  # type: ignore[attr-defined]
    if keep is not None and not isinstance(keep, (Policy, PerRecord)):
        raise InvalidArgumentError(
            f"keep must be a policy such as KeepLast(3), or a dict of such by record, not {keep!r}"
        )
    return keep


def check_chunk_size(chunk_size: int) -> int:
    """``chunk_size``, if it is 64 KiB to 64 MiB. InvalidArgumentError otherwise."""
    if type(chunk_size) is not int or not 64 * 1024 <= chunk_size <= 64 * 1024 * 1024:
        raise InvalidArgumentError(f"chunk_size must be 64 KiB to 64 MiB, not {chunk_size!r}")
    return chunk_size


def check_codec(codec: object) -> str:
    """``codec``, if there is one of that name. InvalidArgumentError otherwise."""
    return str(check_choice("codec", codec, _CODECS))


def check_background_cores(count: int | None) -> int:
    """Cores for a background save: ``count``, or half of those of this process. InvalidArgumentError otherwise."""
    if count is None:
        return max(1, cores() // 2)
    if type(count) is not int or count < 1:
        raise InvalidArgumentError(f"background_cores must be a whole number from 1 on, or None, not {count!r}")
    return count


def check_exit_timeout(seconds: float) -> float:
    """``seconds``, if that is a number from 0 to a day. InvalidArgumentError otherwise."""
    return check_timeout("exit_timeout", seconds)


def check_timeout(name: str, seconds: float) -> float:
    """``seconds``, if that is a number from 0 to a day. InvalidArgumentError otherwise."""
    if type(seconds) not in (int, float) or not 0 <= seconds <= MAX_EXIT_TIMEOUT:
        raise InvalidArgumentError(f"{name} must be 0 to {MAX_EXIT_TIMEOUT:.0f} seconds, not {seconds!r}")
    return float(seconds)


def check_run_id(run_id: object) -> str:
    """``run_id``, if it can name a run or is empty. InvalidArgumentError otherwise."""
    if not isinstance(run_id, str) or (run_id and not _RUN_ID.fullmatch(run_id)):
        raise InvalidArgumentError(
            f"run_id must be up to 128 letters, digits and '._:/@+-', beginning with a letter, digit or '_', "
            f"not {str(run_id)[:140]!r}"
        )
    return run_id


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> Any:
    """``value``, if it is one of ``choices``. InvalidArgumentError otherwise."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgumentError(f"{name} must be one of {choices}, not {value!r}")
    return value


def check_on_full(on_full: object) -> Any:
    """``on_full``, if there is such an answer to a full store. InvalidArgumentError otherwise."""
    return check_choice("on_full", on_full, _ON_FULL)


def check_on_error(on_error: object) -> Any:
    """``on_error``, if there is such an answer to a save that fails. InvalidArgumentError otherwise."""
    return check_choice("on_error", on_error, _ON_ERROR)


def check_max_failures(count: int) -> int:
    """``count``, if it is a whole number from 1 on. InvalidArgumentError otherwise."""
    if type(count) is not int or count < 1:
        raise InvalidArgumentError(f"max_failures must be a whole number from 1 on, not {count!r}")
    return count


def check_flag(name: str, value: object) -> bool:
    """``value``, if it is True or False: "no" would count as yes. InvalidArgumentError otherwise."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} must be True or False, not {value!r}")
    return value


def check_amount(name: str, value: object) -> float:
    """``value``, if it is a number from 0 on. InvalidArgumentError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise InvalidArgumentError(f"{name} is a number of 0 or more, not {value!r}")
    return float(value)


def check_when_busy(when_busy: object, *, alone: bool = True) -> None:
    """InvalidArgumentError unless it is one of the answers to a save that is still in flight."""
    check_choice("when_busy", when_busy, _WHEN_BUSY if alone else _WHEN_BUSY[:1])  # others would wait for it in vain


def check_repository(repo: object) -> None:
    """InvalidArgumentError if it is a URL, which somebody has to open and to close."""
    if isinstance(repo, (str, os.PathLike)):
        raise InvalidArgumentError(
            f"this needs an open repository, not a URL: repo = ckptstore.open({os.fspath(repo)!r})"
        )


def check_metadata(metadata: Mapping[str, Any] | None) -> Any:
    """The skeleton of ``metadata``: a copy that shares nothing with it. InvalidRecordError if it cannot be stored."""
    if metadata is None:
        metadata = {}
    if not _is_mapping(metadata) or not all(isinstance(key, str) for key in metadata):
        raise InvalidRecordError("metadata must be a dict with str keys")
    flat = flatten(dict(metadata), "metadata", convert=False)
    if flat.arrays:
        names = [f"metadata.{path}" for paths in leaf_paths(flat.skeleton).values() for path in paths]
        raise InvalidRecordError(f"an array at {', '.join(names[:10])}: store its .item(), or put it into a record")
    data = msgspec.json.encode(flat.skeleton)
    if len(data) > MAX_METADATA:
        raise InvalidRecordError(f"metadata takes more than {MAX_METADATA} bytes: put it into a record")
    if not fits(data, MAX_OBJECTS // 2 + len(data)):  # half, because a manifest holds records too
        raise InvalidRecordError("metadata holds too many values: put it into a record")
    return flat.skeleton


def check_records(records: Mapping[str, object]) -> dict[str, object]:
    """The states by name, in a dict of its own. InvalidRecordError if that is none, or a name is bad."""
    if not _is_mapping(records) or not 0 < len(records) <= MAX_RECORDS:
        raise InvalidRecordError(f"records must be a dict of 1 to {MAX_RECORDS} records, e.g. {{'model': state}}")
    return {check_record_name(name): state for name, state in list(records.items())}


def check_every(every: object) -> dict[str, int]:
    """``every``: record name → how many epochs apart it is saved. InvalidArgumentError otherwise."""
    if every is None:
        return {}
    if not _is_mapping(every) or not all(type(n) is int and n >= 1 for n in every.values()):  # type: ignore[attr-defined]
        raise InvalidArgumentError(f"every must be a dict such as {{'optimizer': 5}}, not {every!r}")
    return {check_record_name(name): n for name, n in every.items()}  # type: ignore[attr-defined]


def check_sample(share: float) -> float:
    """``share``, if it is more than 0 and at most 1. InvalidArgumentError otherwise."""
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise InvalidArgumentError(f"sample must be more than 0 and at most 1, not {share!r}")
    return float(share)


def check_need(need: object) -> tuple[str, ...]:
    """``need``: names of records. InvalidArgumentError otherwise."""
    if isinstance(need, str) or not isinstance(need, Collection) or not all(isinstance(name, str) for name in need):
        raise InvalidArgumentError(f"need must be a list of record names such as ['model', 'optimizer'], not {need!r}")
    return tuple(need)


def due(
    states: dict[str, object], every: Mapping[str, int], epoch: int, *, some: bool = True
) -> tuple[dict[str, object], dict[str, str]]:
    """The records that ``every`` wants saved at this epoch, and why the others are not.

    InvalidRecordError if none is left (unless not ``some``): such an epoch could not be told from one that was lost.
    """
    left = {name: f"it is saved every {every[name]} epochs" for name in states if name in every and epoch % every[name]}
    if some and len(left) == len(states):
        raise InvalidRecordError(
            f"epoch {epoch} would have no record: every={dict(every)} leaves out {sorted(left)}", epoch=epoch
        )
    return {name: state for name, state in states.items() if name not in left}, left


def check_size(state_or_bytes: Mapping[str, object] | int) -> int:
    """Bytes of the arrays of some records, or that number itself. Raises as ``check_records`` otherwise."""
    if type(state_or_bytes) is int and state_or_bytes >= 0:
        return state_or_bytes
    if not _is_mapping(state_or_bytes):
        raise InvalidArgumentError(
            f"give records such as {{'model': state}}, or their bytes as a number from 0 on, not {state_or_bytes!r}"
        )
    return bytes_of(flatten_all(check_records(state_or_bytes)))  # type: ignore[arg-type]


def flatten_all(states: Mapping[str, object], *, part: bool = False) -> dict[str, FlatState]:
    """All states (of one rank, if ``part``) taken apart, nothing copied.

    InvalidRecordError names all that cannot be stored, in any of them.
    """
    flats: dict[str, FlatState] = {}
    refused: list[InvalidRecordError] = []
    for name, state in states.items():
        try:
            flats[name] = flatten(state, name, part=part)
        except InvalidRecordError as error:
            refused.append(error)
    if len(refused) == 1:
        raise refused[0]
    if refused:
        raise InvalidRecordError("\n".join(error.message for error in refused))
    return flats


def bytes_of(flats: Mapping[str, FlatState]) -> int:
    """Bytes of all arrays."""
    return sum(array.nbytes for flat in flats.values() for array in flat.arrays)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)
