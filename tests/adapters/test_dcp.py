"""torch DCP on our stores: real ranks over gloo, FSDP2 and DTensor; every number of ranks to every other; failures."""

from __future__ import annotations

import collections
import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import ckptstore
from ckptstore import keys
from ckptstore.stores import open_store
from tests.conftest import Bucket

pytest.importorskip("torch.distributed.fsdp", reason="needs torch: make test-adapters")

torch: Any = importlib.import_module("torch")
adapter: Any = importlib.import_module("ckptstore.adapters.dcp")
CkptStoreReader, CkptStoreWriter = adapter.CkptStoreReader, adapter.CkptStoreWriter
ROOT = Path(__file__).parents[2]


class Ranks:
    """Starts ranks; see ``dcp_ranks.py``."""

    def __init__(self, module: str = "dcp_ranks") -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR", **threads}
        command = [sys.executable, "-m", f"tests.adapters.{module}"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def run(self, ranks: int, case: str, *, timeout: float = 60, group: bool = True, **arguments: Any) -> list[Any]:
        """What each rank returned; fails if one did not come to its end."""
        found = self.ended(ranks, case, timeout=timeout, group=group, **arguments)
        assert [one["rank"] for one in found if "returned" in one] == list(range(ranks)), found
        return [one["returned"] for one in found]

    def ended(self, ranks: int, case: str, *, timeout: float = 60, group: bool = True, **arguments: Any) -> list[Any]:
        """How each rank has ended."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        job = {"ranks": ranks, "case": case, "timeout": timeout, "group": group, "arguments": arguments, "port": port}
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        found: list[Any] = json.loads(process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def failures(found: dict[str, Any]) -> dict[str, str]:
    """The errors by rank that a CheckpointException tells, each as its class and message."""
    assert found["error"] == "CheckpointException", found
    return {rank: f"{one['error']}: {one['message']}" for rank, one in found["failures"].items()}


def exact(one: Any, two: Any) -> bool:
    return bool(different(one, two) == [])


def different(one: Any, two: Any) -> Any:
    return importlib.import_module("tests.adapters.dcp_ranks").different(one, two)


# ---- the matrix ---------------------------------------------------------------------------------------------------


def test_any_number_of_ranks_loads_what_any_number_saved(ranks: Ranks, url: str, tmp_path: Path) -> None:
    """P2, P7: FSDP2 with Adam, tied and frozen parameters, on 1 to 4 ranks; bit for bit, and readable without DCP."""
    files = {str(saved): str(tmp_path / f"{saved}.pt") for saved in (1, 2, 3, 4)}
    for saved in (1, 2, 3, 4):
        ranks.run(saved, "train_and_save", url=url, epoch=saved, expected=files[str(saved)])
    for loading in (1, 2, 3, 4):
        assert ranks.run(loading, "load_and_compare", url=url, epochs=files) == [[]] * loading
    for checkpoint in map(ckptstore.open(url).checkpoint, (1, 2, 3, 4)):
        assert checkpoint.metadata == {"ranks": checkpoint.epoch}
        loaded = checkpoint.load()
        assert loaded.pop("state_dict") == {"epoch": checkpoint.epoch}
        assert exact(loaded, torch.load(files[str(checkpoint.epoch)]))
        assert loaded["model"]["head.weight"] is loaded["model"]["embedding.weight"]
    assert {int(key[len("manifests/") :][:12]) for key in keys_of(url) if key.startswith("manifests/")} == {1, 2, 3, 4}
    assert not [key for key in keys_of(url) if key.startswith(keys.LEASES)]


@pytest.mark.s3
def test_the_same_on_s3(ranks: Ranks, s3: Bucket, tmp_path: Path) -> None:
    """4 and 2 ranks save; 3 and 1 load."""
    url, files = s3.url("dcp"), {str(saved): str(tmp_path / f"{saved}.pt") for saved in (4, 2)}
    options = s3.storage_options
    for saved in (4, 2):
        ranks.run(saved, "train_and_save", url=url, epoch=saved, expected=files[str(saved)], options=options)
    for loading in (3, 1):
        assert ranks.run(loading, "load_and_compare", url=url, epochs=files, options=options) == [[]] * loading


def test_whatever_can_be_in_a_state_dict(ranks: Ranks, url: str, tmp_path: Path) -> None:
    """P7: meshes of one and two dimensions, replicas, uneven and empty shards, lists, values of any kind."""
    dump = str(tmp_path / "whole.pt")
    ranks.run(4, "save_zoo", url=url, epoch=1, dump=dump)
    for loading in (4, 2, 3):
        assert ranks.run(loading, "load_zoo", url=url, epoch=1) == [[]] * loading
    loaded, whole = ckptstore.open(url).latest().load(), torch.load(dump, weights_only=False)  # type: ignore[union-attr]
    loaded.update(loaded.pop("state_dict"))
    del whole["optimizer"]["state"]["1"]  # DCP leaves empty dicts out
    assert exact(loaded, whole)


def test_an_empty_dict_in_a_list_keeps_its_place(ranks: Ranks, url: str) -> None:
    ranks.run(2, "save_gap", url=url)
    assert ckptstore.open(url).checkpoint(1).load() == {"groups": [{}, {"lr": 1, "x": [{}, {"y": 2}]}]}


ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@ALONE
def test_one_writer_for_saves_that_overlap(url: str) -> None:
    """P2: each of two threads saves its own state under its own epoch, although both use one writer."""
    dcp = importlib.import_module("torch.distributed.checkpoint")
    planners = importlib.import_module("torch.distributed.checkpoint.default_planner")
    both = threading.Barrier(2, timeout=30)

    class Slow(planners.DefaultSavePlanner):  # type: ignore[misc,name-defined]
        def create_local_plan(self) -> Any:
            both.wait()  # the writer has been told of both epochs
            return super().create_local_plan()

    repo = ckptstore.open(url)
    writer = pickle.loads(pickle.dumps(CkptStoreWriter(repo)))

    def save(epoch: int) -> None:
        state = {"model": {"w": torch.full((1000,), float(epoch))}, "step": epoch}
        dcp.save(state, checkpoint_id=epoch, storage_writer=writer, planner=Slow(), no_dist=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, (1, 2)))
    assert repo.epochs() == [1, 2]
    for epoch in (1, 2):
        found = repo.checkpoint(epoch).load()
        assert (found["state_dict"]["step"], found["model"]["w"][0]) == (epoch, epoch)


def alone(url: str, state: dict[str, Any], epoch: int = 1) -> None:
    """Save on one process."""
    dcp = importlib.import_module("torch.distributed.checkpoint")
    dcp.save(state, storage_writer=CkptStoreWriter(url, epoch), no_dist=True)


@ALONE
@pytest.mark.parametrize(
    "state",
    [
        {1: [torch.ones(2), torch.ones(2)], "1": "text"},
        {"1": "text", 1: [torch.ones(2), torch.ones(2)]},
        {"1": {"x": torch.ones(2)}, 1: "text"},
        {1: {"x": torch.ones(2)}, "1": [torch.ones(2)]},
    ],
)
def test_keys_that_are_the_same_text_lose_nothing(url: str, state: dict[Any, Any]) -> None:
    """P7: DCP makes texts of keys; what one of two such keys has is not left out, it is refused by its path."""
    checkpoint_error = importlib.import_module("torch.distributed.checkpoint").CheckpointException
    with pytest.raises(checkpoint_error) as failed:
        alone(url, {"d": state})
    error, _ = failed.value.failures[0]
    assert isinstance(error, ckptstore.InvalidRecordError)
    assert "d.1" in str(error)
    assert ckptstore.open(url).epochs() == []


@ALONE
def test_empty_and_odd_keys(url: str) -> None:
    """P7: values with arrays in them come back from below keys that are empty, or hold dots and patterns."""
    dcp = importlib.import_module("torch.distributed.checkpoint")
    value = (1, np.arange(3))
    inner = {"": {"": value, "x": value, "*": [value, {"y": value}]}, "a.b": {"c": value}}
    alone(url, {"model": inner, "": {"x": value, "": value}, "w": torch.ones(2)})
    empty = {"": {"": 0, "x": 0, "*": [0, {"y": 0}]}, "a.b": {"c": 0}}
    state = {"model": empty, "": {"x": 0, "": 0}, "w": torch.zeros(2)}
    dcp.load(state, storage_reader=CkptStoreReader(url, 1), no_dist=True)
    assert exact(state, {"model": inner, "": {"x": value, "": value}, "w": torch.ones(2)})


@ALONE
def test_memory_in_common_by_numpy(url: str) -> None:
    """What overlaps is loaded as DCP does it, one after the other, also where torch does not know of it."""
    dcp = importlib.import_module("torch.distributed.checkpoint")
    alone(url, {"m": {"a": torch.arange(6.0), "b": torch.arange(100.0, 106.0)}})
    memory = np.zeros(10, "f4")
    one, two = torch.from_numpy(memory[:6]), torch.from_numpy(memory[4:])
    dcp.load({"m": {"a": one, "b": two}}, storage_reader=CkptStoreReader(url, 1), no_dist=True)
    assert memory.tolist() == [0, 1, 2, 3, 100, 101, 102, 103, 104, 105]


def test_ways_to_save_and_load(ranks: Ranks, url: str) -> None:
    """replace, kept plans, planners of one's own, other types, memory in common, by keys, flat, in the background."""
    assert ranks.run(2, "ways", url=url) == [[], []]
    assert ranks.run(2, "in_background", url=url + "-thread", process=False) == [[], []]
    assert ranks.run(1, "in_background", url=url + "-process", process=True) == [[]]
    assert ranks.run(1, "alone", url=url + "-alone", group=False) == [[]]


def test_what_was_not_saved_by_dcp(ranks: Ranks, url: str, tmp_path: Path) -> None:
    """A plain checkpoint of whole states, of one process, goes into FSDP2 on three ranks."""
    ranks.run(1, "train_and_save", url=url, epoch=1, expected=str(tmp_path / "whole.pt"))
    whole = torch.load(str(tmp_path / "whole.pt"))
    with ckptstore.open(url + "-plain") as repo:
        repo.save(1, whole)
    assert ranks.run(3, "load_others", url=url + "-plain") == [[]] * 3


def test_what_dcp_wrote_by_itself_is_imported(ranks: Ranks, url: str, tmp_path: Path) -> None:
    """P7: the files of 4 ranks, in pieces, become a checkpoint that 3 ranks load."""
    ranks.run(4, "save_by_dcp", folder=str(tmp_path / "out" / "step-9"))
    found = ckptstore.import_files(tmp_path / "out", ckptstore.open(url), arrays=True)
    assert [(one.epoch, one.kind, one.reason) for one in found] == [(9, "saved", "")]
    assert ranks.run(3, "load_imported", url=url) == [[]] * 3


# ---- what lies on the store ----------------------------------------------------------------------------------------


def keys_of(url: str) -> list[str]:
    return sorted(info.key for info in open_store(url).list(""))


def test_replicas_are_stored_once_and_no_pickle(ranks: Ranks, url: str) -> None:
    """P8: the store has JSON and the bytes of arrays, nothing else; what four ranks have the same is there once."""
    assert ranks.run(4, "save_replicas", url=url) == [None] * 4
    store = open_store(url)
    checkpoint = ckptstore.open(url).checkpoint(1)
    arrays = 4 * (250_000 + 8 * 1000 + 1000)
    assert checkpoint.bytes_state == arrays
    sizes: collections.Counter[str] = collections.Counter()
    for key in keys_of(url):
        if key.startswith("reserve/"):  # room for a manifest on a full disk
            continue
        data = store.get(key)
        part = next((name for name in ("chunks", "records", "manifests") if f"{name}/" in key), key)
        sizes[part] += len(data)
        if part == "records":
            json.loads(zstandard.ZstdDecompressor().decompress(data, max_output_size=1 << 24))
        elif part != "chunks":
            json.loads(data)
    assert set(sizes) == {"ckptstore.json", "chunks", "records", "manifests"}
    # Bytes that cannot be compressed, and headers. A pickle beside them would have no room.
    assert 1_000_000 < sizes["chunks"] < arrays + 1000


# ---- failures ------------------------------------------------------------------------------------------------------


def test_a_rank_that_fails_fails_all_by_name(ranks: Ranks, url: str) -> None:
    """P1: a store that refuses one rank's chunks: each rank hears who and why; the epoch before stays; again works."""
    assert ranks.run(4, "save_simple", url=url, epoch=1) == [None] * 4
    for found in ranks.run(4, "failing_save", url=url, epoch=2, doomed=2, how="fails"):
        assert failures(found) == {"2": "AccessError: 403: this rank may not write"}
    assert ckptstore.open(url).epochs() == [1]
    assert ranks.run(3, "load_simple", url=url) == [[]] * 3
    assert ranks.run(4, "failing_save", url=url, epoch=2, doomed=-1, how="fails") == [None] * 4
    assert ckptstore.open(url).epochs() == [1, 2]


@pytest.mark.kill
def test_a_rank_that_is_killed_ends_the_save_on_all(ranks: Ranks, url: str) -> None:
    """P1: SIGKILL amid its chunks: the others fail at once; the epoch before stays; fewer ranks save it again."""
    assert ranks.run(4, "save_simple", url=url, epoch=1) == [None] * 4
    found = ranks.ended(4, "failing_save", url=url, epoch=2, doomed=1, how="killed", timeout=600)
    assert [one.get("code") for one in found] == [None, -9, None, None]
    assert all(one["returned"]["error"] for one in found if "returned" in one)
    assert ckptstore.open(url).epochs() == [1]
    assert ranks.run(3, "save_simple", url=url, epoch=2) == [None] * 3
    repo = ckptstore.open(url)
    repo.gc(grace=0)
    assert not [key for key in keys_of(url) if key.startswith(keys.LEASES)]
    assert ranks.run(2, "load_simple", url=url, epoch=2) == [[]] * 2


def test_a_rank_that_is_slower_than_the_deadline(ranks: Ranks, url: str) -> None:
    """P6: the time of the process group is the deadline: nobody waits longer, and nothing is committed later."""
    assert ranks.run(3, "save_simple", url=url, epoch=1) == [None] * 3
    found = ranks.run(3, "failing_save", url=url, epoch=2, doomed=1, how="slow", timeout=2)
    assert all("Timed out" in one["message"] or "onnection" in one["message"] for one in found), found
    assert ckptstore.open(url).epochs() == [1]


def test_two_launches_at_once(ranks: Ranks, url: str) -> None:
    """P2: one is the epoch, whole; the other fails on all its ranks."""
    found = ranks.run(4, "two_at_once", url=url, epoch=1)
    winner = next(half for half in (0, 1) if found[half] is None)
    assert found[winner] is found[winner + 2] is None
    for lost in (found[1 - winner], found[3 - winner]):
        assert all(text.startswith("EpochExistsError") for text in failures(lost).values())
    loaded = ckptstore.open(url).checkpoint(1).load("model")
    assert sorted(loaded) == ["half", f"of-{winner}", f"of-{winner + 2}"]
    assert loaded["half"].tolist() == [winner] * 1000


def test_a_flipped_bit_is_an_error_on_all_ranks(ranks: Ranks, url: str) -> None:
    """P3: it names the object, and it is the error itself that arrives, with its attributes."""
    assert ranks.run(4, "save_simple", url=url, epoch=1) == [None] * 4
    (key, *_) = [key for key in keys_of(url) if "/chunks/" in key]
    path = Path(url, *key.split("/"))
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    for found in ranks.run(2, "load_simple", url=url, epoch=1):
        told = list(found["failures"].values())
        assert told
        for one in told:
            assert (one["error"], one["key"]) == ("CorruptionError", key)
            assert key in one["message"]


def test_refusals(ranks: Ranks, url: str) -> None:
    """Each is told on every rank, by name, and leaves the repository as it was."""
    ranks.run(2, "save_simple", url=url, epoch=1)
    ckptstore.open(url + "-empty")
    with ckptstore.open(url) as repo:
        repo.save(5, {"model": {"w": torch.zeros(8, 1000)}, "arrays": {"n": np.zeros(3)}})
        repo.save(6, {"state_dict": {"a.b": 1}, "a": {"b": 2}})
    one, two = ranks.run(2, "refusals", url=url)
    assert one.pop("alone")["error"] == two.pop("alone")["error"] == "InvalidArgumentError"
    assert one.pop("partial") is two.pop("partial") is None
    assert {name: failures(found) for name, found in one.items()} == {
        name: failures(found) for name, found in two.items()
    }
    expected = {
        "code": ("1", "InvalidRecordError", "model.hooks.here: objects of type builtin_function_or_method"),
        "sparse": ("0", "InvalidRecordError", "model.w: a tensor of layout sparse_coo"),
        "in a tuple": ("0", "InvalidRecordError", "model.t.0: torch.distributed.tensor.DTensor"),
        "exists": ("01", "EpochExistsError", "epoch 1"),
        "no epoch": ("01", "InvalidArgumentError", "which epoch?"),
        "id": ("0", "InvalidArgumentError", "'step-2'"),
        "epochs": ("0", "TransactionError", "is of epoch 3"),
        "nothing": ("0", "TransactionError", "no records"),
        "missing": ("01", "RuntimeError", "model.new"),
        "shape": ("01", "ValueError", "model.w"),
        "no such epoch": ("01", "EpochNotFoundError", "epoch 7"),
        "nowhere": ("01", "EpochNotFoundError", "-empty"),
        "load id": ("01", "InvalidArgumentError", "'newest'"),
        "array": ("01", "InvalidRecordError", "arrays.n"),
        "value": ("01", "ValueError", "model.w"),
        "ambiguous": ("01", "InvalidRecordError", "'a.b'"),
    }
    assert one.keys() == expected.keys()
    for name, (who, kind, text) in expected.items():
        found = failures(one[name])
        assert "".join(found) == who, (name, found)
        assert all(message.startswith(kind) and text in message for message in found.values()), (name, found)
    assert ckptstore.open(url).epochs() == [1, 5, 6]


# ---- a training run ------------------------------------------------------------------------------------------------


def torchrun(url: str, *doomed: str) -> list[str]:
    """Run the example on two ranks; at each of these lines in turn one is killed, and torchrun starts both anew."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", "--monitor-interval", "0.1", str(ROOT / "examples" / "train_fsdp.py"), url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else gloo finds the addresses of dead ranks there
    lines: list[str] = []
    pids: dict[str, int] = {}
    left = list(doomed)
    process = subprocess.Popen(
        [*command, "--steps", "40", "--every", "3"], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    with process:
        try:
            for line in process.stdout:
                lines.append(line.strip())
                words = line.split()
                if words[:1] == ["rank"]:
                    pids[words[1]] = int(words[-1])
                if left and line.startswith(left[0]):
                    os.kill(pids[str(len(left) % 2)], signal.SIGKILL)
                    del left[0]
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0, lines
    return lines


@pytest.mark.kill
def test_a_killed_run_ends_bit_identical(tmp_path: Path) -> None:
    """P1, P7: FSDP2 under torchrun, saved in the background; rank 0 and rank 1 are killed while saves are in flight."""
    undisturbed, killed = torchrun(str(tmp_path / "one")), torchrun(str(tmp_path / "two"), "step 13 ", "step 25 ")
    starts = sorted({int(line.split()[7].rstrip(",")) for line in killed if line.startswith("rank")})
    assert starts[0] == 0 < 9 <= starts[1] <= 15 < 18 <= starts[2] <= 27
    assert killed[-1].startswith("end ")
    assert killed[-1] == undisturbed[-1]
    for name in ("one", "two"):  # what it was resumed from is kept beside those
        assert ckptstore.open(tmp_path / name).epochs()[-3:] == [33, 36, 39]
