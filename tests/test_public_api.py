"""The front door: what ``import ckptstore`` gives, and what it costs."""

from __future__ import annotations

import builtins
import inspect
import pickle
import re
import subprocess
import sys

import pytest

import ckptstore
from ckptstore import errors

ERRORS = sorted(
    (cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.CkptStoreError)),
    key=lambda cls: cls.__name__,
)
BUILTINS = {
    errors.NotFoundError: KeyError,
    errors.AlreadyExistsError: FileExistsError,
    errors.FormatError: ValueError,
    errors.InvalidArgumentError: ValueError,
    errors.InvalidRecordError: TypeError,
    errors.StoreError: OSError,
}


def test_all_is_sorted_and_complete() -> None:
    """``__all__`` is sorted, without doubles, and holds every error."""
    assert ckptstore.__all__ == sorted(set(ckptstore.__all__))
    assert {cls.__name__ for cls in ERRORS} <= set(ckptstore.__all__)


@pytest.mark.parametrize("name", ckptstore.__all__)
def test_public_names_exist_and_are_documented(name: str) -> None:
    """Every public name can be imported and has a docstring of its own, as have its public methods."""
    thing = getattr(ckptstore, name)
    assert inspect.getdoc(thing), f"ckptstore.{name} has no docstring"
    if inspect.isclass(thing):
        # dataclass() writes "Name(field, ...)" where there is no docstring
        assert not (thing.__doc__ or "").startswith(f"{name}("), f"ckptstore.{name} has no docstring"
        bare = [member for member, value in vars(thing).items() if _is_public_callable(member, value)]
        assert [member for member in bare if not inspect.getdoc(getattr(thing, member))] == []


def _is_public_callable(name: str, value: object) -> bool:
    return not name.startswith("_") and (
        inspect.isroutine(value) or isinstance(value, (property, classmethod, staticmethod))
    )


def test_version_is_that_of_the_installed_package() -> None:
    """``__version__`` comes from the metadata; any other unknown name is an AttributeError."""
    from importlib.metadata import version

    assert version("ckptstore") == ckptstore.__version__
    with pytest.raises(AttributeError, match="no_such_name"):
        ckptstore.no_such_name  # noqa: B018 (the access is the test)


def test_importing_is_light() -> None:
    """``import ckptstore`` loads no framework, no cloud client, no CLI and no test kit."""
    heavy = ["torch", "jax", "s3fs", "gcsfs", "fsspec", "aiobotocore", "botocore", "google.auth", "typer", "pytest"]
    heavy += ["ckptstore.cli", "ckptstore.adapters", "ckptstore.testing"]
    program = f"import sys, ckptstore; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("[]", "", 0)


def test_error_tree_is_as_drawn() -> None:
    """The tree in the docstring of ``errors`` is the tree of the classes."""
    drawn: dict[str, list[str]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(r" {4}((?:[│├└][─ ]{3}| {4})*)(\w+Error)(?: \((\w+)\))?(?: {2,}.*)?", line)
        if match:
            path[len(match[1]) // 4 :] = [match[2]]
            drawn[match[2]] = [*path[-2:-1], *([match[3]] if match[3] else [])] or ["Exception"]
    assert drawn == {cls.__name__: [base.__name__ for base in cls.__bases__] for cls in ERRORS}


@pytest.mark.parametrize(("cls", "builtin"), BUILTINS.items())
def test_errors_are_caught_as_builtins(cls: type[errors.CkptStoreError], builtin: type[Exception]) -> None:
    """Code that knows only Python's own exceptions catches ours as the matching one."""
    assert getattr(builtins, builtin.__name__) is builtin
    for each in (one for one in ERRORS if issubclass(one, cls)):
        with pytest.raises(builtin):
            raise each("no luck")


@pytest.mark.parametrize("cls", ERRORS)
def test_errors_say_their_message(cls: type[errors.CkptStoreError]) -> None:
    """str() is the message, whatever builtin the class also is, and has a docstring of its own."""
    error = cls("cannot read 'a/b'", key="a/b", epoch=7, errno=5)
    assert (str(error), error.key, error.epoch, error.errno) == ("cannot read 'a/b'", "a/b", 7, 5)
    error.message = "epoch 7: cannot read 'a/b'"  # what was found out later is said by all of them
    assert str(error) in repr(error)
    assert repr(error).startswith(f"{cls.__name__}(")
    bare = cls("why")
    assert (str(bare), bare.key, bare.epoch, bare.errno) == ("why", None, None, None)
    assert cls.__doc__


@pytest.mark.parametrize("cls", ERRORS)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_errors_can_be_pickled(cls: type[errors.CkptStoreError], protocol: int) -> None:
    """An error that crosses a process boundary keeps its class, message, key, epoch and errno."""
    copy = pickle.loads(pickle.dumps(cls("full: 'k'", key="k", epoch=3, errno=28), protocol))
    assert type(copy) is cls
    assert (str(copy), copy.key, copy.epoch, copy.errno) == ("full: 'k'", "k", 3, 28)
