"""Bucket: what a bucket knows besides its objects, asked by its own client: unfinished uploads, rules, old versions.

Nothing of ckptstore depends on the answers. They are for people: what a bucket keeps after a delete costs money, and
a rule that expires objects takes chunks that newer checkpoints still refer to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckptstore.stores.base import Store
from ckptstore.stores.remote import RemoteStore
from ckptstore.stores.remote_errors import Missing

_DAY = 86_400
_PAGES = 20
_COLD = {"GLACIER", "DEEP_ARCHIVE"}
"""Classes of S3 whose objects have to be restored for hours before they can be read."""


@dataclass(frozen=True, slots=True)
class Uploads:
    """Multipart uploads that were begun and never ended. They cost, and no listing of objects shows them.

    Attributes:
        names: of their objects, below the prefix, up to a thousand.
        oldest: when the oldest of them was begun, in seconds since 1970-01-01 UTC by the store's clock.
        more: whether there are still more.
    """

    names: tuple[str, ...]
    oldest: float | None
    more: bool


@dataclass(frozen=True, slots=True)
class Rules:
    """Lifecycle rules that act on objects below the prefix.

    Attributes:
        abort_days: days after which an unfinished upload is aborted; None: never.
        deleting: rules that delete objects by their age, in words.
        archiving: rules that move objects to where they cannot be read at once, in words.
        old_days: days after which old versions are deleted; None: never.
    """

    abort_days: int | None = None
    deleting: tuple[str, ...] = ()
    archiving: tuple[str, ...] = ()
    old_days: int | None = None


@dataclass(frozen=True, slots=True)
class Keeping:
    """What the bucket keeps of objects that are overwritten or deleted.

    Attributes:
        versions: old versions stay.
        locked_days: nothing that is put can be deleted for good before so many days have passed.
        soft_days: days for which deleted objects can be had back, and are paid for.
    """

    versions: bool = False
    locked_days: float = 0.0
    soft_days: float = 0.0


class Bucket:
    """The bucket of a store, for questions. Each raises ``StoreError`` where the server does not answer it.

    ``NotSupported``: it does not know the question. ``AccessError``: it may not be asked by us.
    """

    def __init__(self, remote: RemoteStore) -> None:
        self._remote = remote
        self._s3 = remote.scheme == "s3"
        self.rights = _S3_RIGHTS if self._s3 else _GCS_RIGHTS
        """By question: the permission that it takes."""

    @property
    def scheme(self) -> str:
        """ "s3" or "gs"."""
        return self._remote.scheme

    def uploads(self) -> Uploads | None:
        """Unfinished uploads below the prefix; None where they cannot be listed (GCS ends them after a week)."""
        if not self._s3:
            return None
        reply = self._ask_s3("list the uploads of", "list_multipart_uploads", Prefix=self._remote.root)
        found = reply.get("Uploads") or ()
        oldest = min((one["Initiated"].timestamp() for one in found if one.get("Initiated")), default=None)
        return Uploads(tuple(str(one["Key"]) for one in found), oldest, bool(reply.get("IsTruncated")))

    def rules(self) -> Rules:
        """Its lifecycle rules, as far as they concern us."""
        if not self._s3:
            return _gcs_rules((self._about().get("lifecycle") or {}).get("rule") or (), self._remote.root)
        try:
            reply = self._ask_s3("ask for the lifecycle rules of", "get_bucket_lifecycle_configuration")
        except Missing:
            return Rules()
        return _s3_rules(reply.get("Rules") or (), self._remote.root)

    def keeping(self) -> Keeping:
        """What becomes of deleted objects."""
        if not self._s3:
            return _gcs_keeping(self._about())
        status = self._ask_s3("ask for the versioning of", "get_bucket_versioning").get("Status")
        if status not in ("Enabled", "Suspended"):
            return Keeping()
        try:
            reply = self._ask_s3("ask for the object lock of", "get_object_lock_configuration")
        except Missing:
            return Keeping(versions=True)
        retention = ((reply.get("ObjectLockConfiguration") or {}).get("Rule") or {}).get("DefaultRetention") or {}
        locked = float(retention.get("Days") or 365 * (retention.get("Years") or 0))
        return Keeping(versions=True, locked_days=locked)

    def forget(self, keys: Collection[str], prefix: str) -> None:
        """Delete all versions of some objects for good, those of a bucket that keeps old ones too.

        Args:
            prefix: what all of ``keys`` begin with.
        """
        names = {self._remote.root + key for key in keys}
        for step in list(self._old(names, self._remote.root + prefix)):
            self._remote.ask("delete an old version in", step)

    def _old(self, names: Collection[str], prefix: str) -> Iterator[Any]:
        """The requests that delete every version of ``names``."""
        after: dict[str, Any] = {}
        for _ in range(_PAGES):
            if self._s3:
                reply = self._ask_s3("list the versions in", "list_object_versions", Prefix=prefix, **after)
                for one in (*(reply.get("Versions") or ()), *(reply.get("DeleteMarkers") or ())):
                    if one["Key"] in names:
                        yield partial(_s3_call, "delete_object", Key=one["Key"], VersionId=one["VersionId"])
                marks = {"KeyMarker": reply.get("NextKeyMarker"), "VersionIdMarker": reply.get("NextVersionIdMarker")}
                after = {name: mark for name, mark in marks.items() if mark}
            else:
                reply = self._remote.ask(
                    "list the versions in", partial(_gcs_call, "GET", "b/{}/o", prefix=prefix, versions="true", **after)
                )
                for one in reply.get("items") or ():
                    if one["name"] in names:
                        yield partial(_gcs_delete, one["name"], str(one["generation"]))
                after = {"pageToken": reply["nextPageToken"]} if reply.get("nextPageToken") else {}
            if not after or (self._s3 and not reply.get("IsTruncated")):
                return

    def _ask_s3(self, action: str, operation: str, **arguments: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._remote.ask(action, partial(_s3_call, operation, **arguments))
        return found

    def _about(self) -> dict[str, Any]:
        found: dict[str, Any] = self._remote.ask("ask for the settings of", partial(_gcs_call, "GET", "b/{}"))
        return found


_S3_RIGHTS = {
    "uploads": "s3:ListBucketMultipartUploads",
    "rules": "s3:GetLifecycleConfiguration",
    "keeping": "s3:GetBucketVersioning and s3:GetBucketObjectLockConfiguration",
    "put": "s3:PutObject",
    "get": "s3:GetObject",
    "list": "s3:ListBucket (on the bucket itself)",
    "delete": "s3:DeleteObject",
}
_GCS_RIGHTS = {
    **dict.fromkeys(("uploads", "rules", "keeping"), "storage.buckets.get"),
    "put": "storage.objects.create",
    "get": "storage.objects.get",
    "list": "storage.objects.list",
    "delete": "storage.objects.delete (also to overwrite)",
}


def base_of(store: Store) -> Store:
    """The store at the bottom of a stack of wrappers."""
    while isinstance(inner := getattr(store, "inner", None), Store):
        store = inner
    return store


def bucket_of(store: Store) -> Bucket | None:
    """The bucket that a store is in, if it is in one."""
    base = base_of(store)
    return Bucket(base) if isinstance(base, RemoteStore) else None


async def _s3_call(operation: str, backend: Any, fs: Any, **arguments: Any) -> Any:
    return await fs._call_s3(operation, Bucket=backend.bucket, **arguments)


async def _gcs_call(method: str, path: str, backend: Any, fs: Any, **query: Any) -> Any:
    return await backend._json(fs, method, path, backend.bucket, **query)


async def _gcs_delete(name: str, generation: str, backend: Any, fs: Any) -> None:
    await backend._request(fs, "DELETE", "b/{}/o/{}", backend.bucket, name, generation=generation)


def _s3_rules(rules: Iterable[Mapping[str, Any]], root: str) -> Rules:
    abort: list[int] = []
    old: list[int] = []
    deleting, archiving = [], []
    for rule in rules:
        chosen = rule.get("Filter") or {}
        chosen = {**chosen, **(chosen.get("And") or {})}
        prefix = str(rule.get("Prefix") or chosen.get("Prefix") or "")
        tagged = chosen.get("Tag") or chosen.get("Tags")  # our objects have no tags
        if rule.get("Status") != "Enabled" or tagged or not (root.startswith(prefix) or prefix.startswith(root)):
            continue
        name = f"rule {rule.get('ID') or 'without a name'!r}" + (f" for {prefix!r}" if prefix else "")
        days = (rule.get("AbortIncompleteMultipartUpload") or {}).get("DaysAfterInitiation")
        if days and root.startswith(prefix):
            abort.append(int(days))
        noncurrent = (rule.get("NoncurrentVersionExpiration") or {}).get("NoncurrentDays")
        if noncurrent and root.startswith(prefix):
            old.append(int(noncurrent))
        expiry = rule.get("Expiration") or {}
        if expiry.get("Days") or expiry.get("Date"):
            deleting.append(f"{name}: {_when(expiry)}")
        archiving += [
            f"{name}: to {move['StorageClass']} {_when(move)}"
            for move in rule.get("Transitions") or ()
            if move.get("StorageClass") in _COLD
        ]
    return Rules(min(abort, default=None), tuple(deleting), tuple(archiving), min(old, default=None))


def _when(rule: Mapping[str, Any]) -> str:
    return f"after {rule['Days']} days" if rule.get("Days") is not None else f"on {rule.get('Date')}"


def _gcs_rules(rules: Iterable[Mapping[str, Any]], root: str) -> Rules:
    abort: list[int] = []
    old: list[int] = []
    deleting = []
    for rule in rules:
        action, condition = rule.get("action") or {}, rule.get("condition") or {}
        prefixes = condition.get("matchesPrefix") or [""]
        if not any(root.startswith(prefix) or prefix.startswith(root) for prefix in prefixes):
            continue
        age = condition.get("age")
        of_old = condition.get("isLive") is False or {"numNewerVersions", "daysSinceNoncurrentTime"} & set(condition)
        if action.get("type") == "AbortIncompleteMultipartUpload" and age is not None:
            abort.append(int(age))
        elif action.get("type") == "Delete" and of_old:
            old.append(int(condition.get("daysSinceNoncurrentTime") or age or 0))
        elif action.get("type") == "Delete":
            deleting.append(f"a rule: after {age} days" if age is not None else f"a rule: where {dict(condition)}")
    return Rules(min(abort, default=None), tuple(deleting), (), min(old, default=None))


def _gcs_keeping(about: Mapping[str, Any]) -> Keeping:
    lock = float((about.get("retentionPolicy") or {}).get("retentionPeriod") or 0)
    soft = float((about.get("softDeletePolicy") or {}).get("retentionDurationSeconds") or 0)
    versions = bool((about.get("versioning") or {}).get("enabled"))
    return Keeping(versions, lock / _DAY, soft / _DAY)
