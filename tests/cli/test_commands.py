"""The commands: their tables, their JSON, their exit codes, and what they say when something is wrong."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

import ckptstore
from ckptstore import errors, indexes, manifest
from ckptstore.cli._app import exit_code, message_of
from ckptstore.stores.remote_errors import NO_CREDENTIALS
from tests.cli.conftest import Run, chunks_of, flip

COMMANDS = (
    *("ls", "show", "save", "restore", "rm", "verify", "plan", "prune", "gc", "pin", "unpin"),
    *("scrub", "repair", "quarantine", "mirror", "cp", "tiers", "du", "diff", "import", "watch"),
    *("export", "report", "preflight", "doctor", "bench", "demo"),
)


# ---- the command itself ----------------------------------------------------------------------------------------


def test_help_names_every_command_and_shows_an_example(run: Run) -> None:
    """``--help`` lists the commands and the exit codes; each command's help has an example."""
    top = run("--help")
    assert top.code == 0
    assert "4 corrupt" in top.out
    for command in COMMANDS:
        assert command in top.out
        shown = run(command, "--help")
        assert shown.code == 0
        assert f"Example: ckptstore {command}" in " ".join(shown.out.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_the_commands(shell: str) -> None:
    """What ``--install-completion`` sets up asks the program, and it answers with the commands that begin so."""
    asked = {"_CKPTSTORE_COMPLETE": f"complete_{shell}", "COMP_WORDS": "ckptstore rep", "COMP_CWORD": "1"}
    asked |= {"_TYPER_COMPLETE_ARGS": "ckptstore rep", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    code = "import sys; sys.argv = ['ckptstore']; from ckptstore.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True)
    assert "repair" in done.stdout
    assert "report" in done.stdout
    assert "verify" not in done.stdout


def test_version_is_the_package_version(run: Run) -> None:
    """``--version`` prints the version of the installed package."""
    assert run("--version").out == f"ckptstore {ckptstore.__version__}\n"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "frob",
        "ls",
        "ls x --frob",
        "show x seven",
        "save x --epoch 1",
        "save x a=b",
        "restore x",
        "verify x --epoch",
    ],
)
def test_usage_errors_exit_with_1(run: Run, line: str) -> None:
    """A command line that makes no sense is exit code 1, and the error is one line."""
    result = run(*line.split())
    assert result.code == 1
    assert result.err.count("\n") <= 1
    assert not line or result.err.startswith("error: ")


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.InvalidArgumentError, 1),
        (errors.InvalidRecordError, 1),
        (errors.EpochExistsError, 1),
        (errors.FormatError, 2),
        (errors.TransactionError, 2),
        (errors.OutcomeUnknownError, 2),
        (errors.RepositoryNotFoundError, 3),
        (errors.EpochNotFoundError, 3),
        (errors.RecordNotFoundError, 3),
        (errors.CorruptionError, 4),
        (errors.AccessError, 5),
        (errors.StoreFullError, 5),
        (errors.RetriesExhaustedError, 5),
    ],
)
def test_each_error_has_its_exit_code(kind: type[errors.CkptStoreError], code: int) -> None:
    """The exit code tells a script what to do about a failure."""
    assert exit_code(kind("what, where, what to do")) == code
    assert exit_code(ValueError("a bug")) == 2


def test_messages_speak_of_options_not_of_python() -> None:
    """Advice to pass an argument in Python becomes advice to use an option."""
    error = errors.EpochExistsError("epoch 1 is there: save another epoch, or pass replace=True")
    assert message_of(error).endswith("or use --replace")
    refused = errors.AccessError(f"no credentials; {NO_CREDENTIALS.advice}")
    assert message_of(refused).endswith("give credentials by --option or the environment")
    assert "--debug" in message_of(ValueError("a bug"))


def test_the_log_is_left_as_it_was(run: Run, tmp_path: Path) -> None:
    """A command run inside a program leaves the program's logging alone."""
    log = logging.getLogger("ckptstore")
    before = (log.level, list(log.handlers))
    run("--debug", "ls", tmp_path)
    assert (log.level, list(log.handlers)) == before


def test_the_module_is_the_command(tmp_path: Path) -> None:
    """``python -m ckptstore``, for who has several Pythons, or none of their scripts on the PATH."""
    command = [sys.executable, "-m", "ckptstore", "ls", str(tmp_path / "nothing")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr.startswith("error: there is no repository at ")


def test_a_process_of_its_own_reports_the_code(tmp_path: Path) -> None:
    """The exit code of the process is the exit code of the command; a traceback is shown only with ``--debug``."""
    line = [sys.executable, "-m", "ckptstore.cli", "ls", str(tmp_path / "nothing")]
    plain = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (plain.returncode, plain.stdout) == (3, "")
    assert plain.stderr.startswith("error: there is no repository at ")
    assert plain.stderr.count("\n") == 1
    debug = subprocess.run([*line, "--debug"], capture_output=True, text=True, check=False)
    assert debug.returncode == 3
    assert "Traceback" in debug.stderr


def test_a_closed_pipe_is_no_traceback(state_repo: Path) -> None:
    """``ckptstore ls | head`` ends quietly when its reader goes away."""
    read, write = os.pipe()
    os.close(read)
    line = [sys.executable, "-m", "ckptstore.cli", "ls", str(state_repo)]
    done = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert "Traceback" not in done.stderr
    assert done.returncode != 0


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(file_repo: Path, tmp_path: Path, closed: str) -> None:
    """A command that nobody listens to does its work, and the right one; no object is written over."""
    line = f"{sys.executable} -m ckptstore.cli save {file_repo} --epoch 9 model=/etc/hostname {closed}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    with ckptstore.open(file_repo) as repo:
        assert repo.latest(deep=True).epoch == 9  # type: ignore[union-attr]
    missing = f"{sys.executable} -m ckptstore.cli ls {tmp_path / 'nothing'} {closed}"
    assert subprocess.run(["sh", "-c", missing], capture_output=True, check=False).returncode == 3


@pytest.mark.parametrize("encoding", ["ascii", "cp1251"])
def test_terminals_that_lack_a_sign(file_repo: Path, tmp_path: Path, encoding: str) -> None:
    """It is escaped: a command that has done its work does not end in an error because of a sign."""
    place = tmp_path / "отчёт-é.html"
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    for arguments in (["doctor", "--no-speed"], ["report", "-o", str(place)]):
        line = [sys.executable, "-m", "ckptstore.cli", arguments[0], str(file_repo), *arguments[1:]]
        done = subprocess.run(line, capture_output=True, env=environment, check=False)
        assert (done.returncode, done.stderr) == (0, b""), arguments
    assert place.exists()


def test_a_full_disk_under_the_output(file_repo: Path) -> None:
    """What could not be printed is an error."""
    for json in ([], ["--json"]):
        with open("/dev/full", "w") as full:
            line = [sys.executable, "-m", "ckptstore.cli", "ls", str(file_repo), *json]
            done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_told_to_end(tmp_path: Path, number: signal.Signals) -> None:
    """A command that is told to end tidies up, as after Ctrl-C: doctor leaves nothing behind."""
    place = tmp_path / "not" / "there"
    line = [sys.executable, "-m", "ckptstore.cli", "doctor", str(place)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 60
        while not any((place / "probes").glob("*")) and time.monotonic() < end:
            time.sleep(0.002)
        process.send_signal(number)
        process.send_signal(number)  # as ``timeout`` does
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert said == "error: interrupted\n"
    assert list(tmp_path.iterdir()) == []


# ---- ls and show -----------------------------------------------------------------------------------------------


def test_ls_shows_every_epoch_with_sizes_and_metadata(run: Run, file_repo: Path) -> None:
    """``ls`` shows epoch, sizes in binary units, ratio and metadata of each checkpoint."""
    result = run("ls", file_repo)
    assert result.code == 0
    head, first, second = result.out.splitlines()
    assert head.split() == ["epoch", "gen", "state", "stored", "ratio", "created", "records", "metadata"]
    assert first.split()[:2] == ["1", "1"]
    assert "586 KiB" in second
    assert "model optimizer" in second
    assert "loss=0.5" in second


def test_ls_json(run: Run, file_repo: Path) -> None:
    """``ls --json`` holds the same in bytes."""
    found = run("ls", file_repo, "--json").json
    assert [entry["epoch"] for entry in found["epochs"]] == [1, 2]
    last = found["epochs"][-1]
    assert last["bytes_state"] == 600_004
    assert last["records"] == ["model", "optimizer"]
    assert last["metadata"] == {"loss": 0.5}
    assert last["damaged"] is None


def test_ls_marks_a_damaged_manifest_and_exits_with_0(run: Run, state_repo: Path) -> None:
    """A damaged manifest is listed as damaged, not hidden; the listing itself is complete."""
    flip(state_repo / "manifests" / "000000000002-000001.json")
    result = run("ls", state_repo)
    assert result.code == 0
    assert "DAMAGED" in result.out.splitlines()[2]
    assert "1 of 3 manifests are damaged" in result.err
    entries = run("ls", state_repo, "--json").json["epochs"]
    assert [bool(entry["damaged"]) for entry in entries] == [False, True, False]


def test_metadata_without_json_form_becomes_text(run: Run, state_repo: Path) -> None:
    """NaN, tuples and bytes in metadata do not make the JSON invalid."""
    assert run("ls", state_repo, "--json").json["epochs"][0]["metadata"] == {"loss": "nan", "by": [1, "b'x'"]}


def test_metadata_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    """Control characters and markup in metadata are shown, not obeyed."""
    ckptstore.open(tmp_path / "r").save(1, {"m": {"x": 1}}, {"a\x1b[31m": "[bold]b[/bold]\n"})
    for command in ("ls", "show"):
        shown = run(command, tmp_path / "r").out
        assert "\x1b" not in shown
        assert "[bold]b[/bold]\\n" in shown


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_an_empty_repository_is_no_error(run: Run, tmp_path: Path, command: str) -> None:
    """A repository without checkpoints lists and verifies well."""
    ckptstore.open(tmp_path / "r").close()
    result = run(command, tmp_path / "r")
    assert result.code == 0
    assert "no checkpoint yet" in result.out
    assert run(command, tmp_path / "r", "--json").json["epochs"] == []


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_reading_creates_nothing(run: Run, tmp_path: Path, command: str) -> None:
    """A command that reads does not create a repository: exit code 3."""
    assert run(command, tmp_path / "r").code == 3
    assert run("restore", tmp_path / "r", "--to", tmp_path / "out").code == 3
    assert not list(tmp_path.iterdir())


def test_show_names_records_files_and_arrays(run: Run, file_repo: Path, state_repo: Path) -> None:
    """``show`` shows the newest epoch or the one asked for; ``--arrays`` every array with type and shape."""
    assert "file model.bin" in run("show", file_repo).out
    shown = run("show", state_repo, 2, "--arrays").out
    assert "enc.w" in shown
    assert "300 × 200" in shown
    found = run("show", state_repo, 2, "--arrays", "--json").json
    assert (found["epoch"], found["records"][0]["kind"]) == (2, "state")
    assert found["records"][0]["array_list"][0]["shape"] == [300, 200]
    assert run("show", file_repo, 1, "--json").json["records"][0]["file"] == "model.bin"


@pytest.mark.parametrize("line", ["show {} 99", "verify {} --epoch 99", "restore {} --epoch 99 --to {}-out"])
def test_an_epoch_that_is_not_there_is_exit_code_3(run: Run, file_repo: Path, line: str) -> None:
    """Asking for an epoch that does not exist names it and exits with 3."""
    result = run(*(word.format(file_repo) for word in line.split()))
    assert result.code == 3
    assert "no epoch 99" in result.err


# ---- save ------------------------------------------------------------------------------------------------------


def test_save_and_restore_bring_the_same_bytes_back(run: Run, tmp_path: Path, files: dict[str, Path]) -> None:
    """What ``save`` stores, ``restore`` writes under the original names, bit for bit."""
    pairs = [f"{name}={path}" for name, path in files.items()]
    saved = run("save", tmp_path / "r", "--epoch", 7, *pairs, "--metadata", "loss=0.31", "--metadata", "note=a=b")
    assert saved.code == 0
    assert "saved epoch 7" in saved.out
    assert ckptstore.open(tmp_path / "r").checkpoint(7).metadata == {"loss": 0.31, "note": "a=b"}
    restored = run("restore", tmp_path / "r", "--to", tmp_path / "new" / "out", "--json")
    assert restored.json["epoch"] == 7
    for path in files.values():
        assert (tmp_path / "new" / "out" / path.name).read_bytes() == path.read_bytes()
    assert sorted(p.name for p in (tmp_path / "new" / "out").iterdir()) == ["model.bin", "optim.bin"]


def test_save_json_counts_what_was_sent(run: Run, tmp_path: Path, files: dict[str, Path]) -> None:
    """A second save of the same files sends next to nothing and says so."""
    first = run("save", tmp_path / "r", "--epoch", 1, f"m={files['model']}", "--json").json
    second = run("save", tmp_path / "r", "--epoch", 2, f"m={files['model']}", "--json").json
    assert first["bytes_reused"] == 0
    assert second["bytes_reused"] == second["bytes_state"] == files["model"].stat().st_size
    assert second["bytes_sent"] < 2000 < first["bytes_sent"]


def test_save_refuses_an_existing_epoch_without_replace(run: Run, file_repo: Path, files: dict[str, Path]) -> None:
    """An epoch is never replaced by accident: exit code 1, and the message names the option."""
    refused = run("save", file_repo, "--epoch", 2, f"only={files['model']}")
    assert refused.code == 1
    assert "--replace" in refused.err
    assert run("save", file_repo, "--epoch", 2, f"only={files['model']}", "--replace", "--json").json["generation"] == 2
    assert run("ls", file_repo, "--json").json["epochs"][-1]["records"] == ["only"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["m=missing.bin"], 3, "does not exist"),
        (["m=."], 1, "no file"),
        (["m"], 1, "NAME=FILE"),
        (["../m={file}"], 1, "not a record name"),
        (["m={file}", "m={file}"], 1, "twice"),
        (["m={file}", "--metadata", "loss"], 1, "KEY=VALUE"),
        (["m={file}", "--option", "secret"], 1, "KEY=VALUE"),
        (["m={file}", "--option", "key=x"], 1, "s3://"),
        (["m={file}", "--epoch=-1"], 1, "out of range"),
    ],
)
def test_save_refuses_bad_input_and_creates_nothing(
    run: Run, tmp_path: Path, files: dict[str, Path], arguments: list[str], code: int, says: str
) -> None:
    """Bad input is refused by name before a repository is created."""
    words = [word.format(file=files["model"]) for word in arguments]
    result = run("save", tmp_path / "r", "--epoch", 1, *words)
    assert result.code == code
    assert says in result.err
    assert not (tmp_path / "r").exists()


def test_unknown_schemes_and_foreign_folders_are_refused(run: Run, tmp_path: Path, files: dict[str, Path]) -> None:
    """An unknown scheme is exit code 1; a folder that holds something else is refused and left alone."""
    assert run("ls", "ftp://host/x").code == 1
    folder = files["model"].parent
    result = run("save", folder, "--epoch", 1, f"m={files['model']}")
    assert result.code == 2
    assert "holds something else" in result.err
    assert sorted(p.name for p in folder.iterdir()) == ["model.bin", "optim.bin"]


def test_a_store_that_does_not_answer_is_exit_code_5(run: Run, tmp_path: Path, files: dict[str, Path]) -> None:
    """A file where the repository's folder should be is a store error, never an empty repository."""
    result = run("ls", files["model"])
    assert result.code == 5
    assert result.out == ""


# ---- restore ---------------------------------------------------------------------------------------------------


def test_restore_overwrites_only_with_force(run: Run, tmp_path: Path, file_repo: Path, files: dict[str, Path]) -> None:
    """An existing file is refused before anything is written; ``--force`` overwrites it."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "optim.bin").write_text("mine")
    refused = run("restore", file_repo, "--to", out)
    assert refused.code == 1
    assert "--force" in refused.err
    assert [p.name for p in out.iterdir()] == ["optim.bin"]
    assert (out / "optim.bin").read_text() == "mine"
    assert run("restore", file_repo, "--to", out, "--force").code == 0
    assert (out / "optim.bin").read_bytes() == files["optimizer"].read_bytes()


def test_restore_of_one_record(run: Run, tmp_path: Path, file_repo: Path) -> None:
    """``--record`` restores that record alone; an unknown one is exit code 3."""
    assert run("restore", file_repo, "--to", tmp_path / "o", "--record", "model").code == 0
    assert [p.name for p in (tmp_path / "o").iterdir()] == ["model.bin"]
    unknown = run("restore", file_repo, "--to", tmp_path / "o2", "--record", "nope")
    assert unknown.code == 3
    assert "it has ['model', 'optimizer']" in unknown.err


def test_restore_of_a_state_points_to_python(run: Run, tmp_path: Path, state_repo: Path) -> None:
    """A state is no file: refused before anything is written, with the Python that loads it."""
    result = run("restore", state_repo, "--to", tmp_path / "o")
    assert result.code == 1
    assert ".checkpoint(3).load('model')" in result.err
    assert not (tmp_path / "o").exists()


def test_restore_of_the_files_beside_a_state(run: Run, tmp_path: Path, files: dict[str, Path]) -> None:
    """File records can be restored from a checkpoint that also holds states, if they alone are chosen."""
    with ckptstore.open(tmp_path / "r").begin(1) as txn:
        txn.write("state", {"x": 1})
        txn.write_file("model", files["model"])
    refused = run("restore", tmp_path / "r", "--to", tmp_path / "o")
    assert refused.code == 1
    assert "--record model" in refused.err
    assert run("restore", tmp_path / "r", "--to", tmp_path / "o", "--record", "model").code == 0


def test_restore_refuses_two_records_of_one_file_name(run: Run, tmp_path: Path, files: dict[str, Path]) -> None:
    """Two records that were files of the same name are refused, not written over each other."""
    same = tmp_path / "other" / "model.bin"
    same.parent.mkdir()
    same.write_text("another")
    run("save", tmp_path / "r", "--epoch", 1, f"a={files['model']}", f"b={same}")
    result = run("restore", tmp_path / "r", "--to", tmp_path / "o")
    assert result.code == 1
    assert "'a' and 'b'" in result.err
    assert not (tmp_path / "o").exists()


PATHS: dict[str, tuple[tuple[str, str], int, str]] = {
    "one below the other": (("d", "d/x"), 1, "would lie below 'd'"),
    "the other way round": (("d/x", "d"), 1, "would lie below 'd'"),
    "no name of a file": (("\ud800", "d"), 1, "no name that a file can have"),
    "too long": (("d", "x" * 300), 5, "File name too long"),
    "too deep": (("d", "e/" * 3000 + "x"), 5, "File name too long"),
    "a file in the way": (("d", "there/x"), 5, "could not be written"),
}


@pytest.mark.parametrize("what", sorted(PATHS))
def test_restore_of_paths_that_cannot_be(run: Run, tmp_path: Path, files: dict[str, Path], what: str) -> None:
    """P8: paths come from a store. All files get their names, or none."""
    paths, code, said = PATHS[what]
    file = {"content": 1, "size": 1, "mtime_ns": 1, "inode": 1}
    entries = {name: {"path": path, **file} for name, path in zip("ab", paths, strict=True)}
    origin = {"ckptstore.files": {"layout": "x", "folder": "y", "files": entries}}
    with ckptstore.open(tmp_path / "r") as repo, repo.begin(1, origin) as txn:
        txn.write_file("a", files["model"])
        txn.write_file("b", files["model"])
    place = tmp_path / "o"
    place.mkdir()
    (place / "there").write_text("mine")
    result = run("restore", tmp_path / "r", "--to", place)
    assert result.code == code, result.err
    assert said in result.err
    assert [path.name for path in place.rglob("*")] == ["there"]
    assert (place / "there").read_text() == "mine"


def test_restore_of_a_damaged_epoch_writes_nothing(run: Run, tmp_path: Path, file_repo: Path) -> None:
    """A damaged record leaves no file at all, not even those of the good records: exit code 4."""
    flip(chunks_of(file_repo, 2)[0])
    result = run("restore", file_repo, "--epoch", 2, "--to", tmp_path / "o")
    assert result.code == 4
    assert chunks_of(file_repo, 2)[0].name in result.err
    assert not (tmp_path / "o").exists()


def test_restore_steps_back_over_damage_and_says_so(run: Run, tmp_path: Path, file_repo: Path) -> None:
    """Without ``--epoch`` the newest intact epoch is restored, and the one stepped over is named."""
    flip(chunks_of(file_repo, 2)[0])
    result = run("restore", file_repo, "--to", tmp_path / "o", "--json")
    assert result.code == 0
    assert result.json["epoch"] == 1
    assert [skipped["epoch"] for skipped in result.json["skipped"]] == [2]
    assert "warning: epoch 2" in result.err


def test_a_hostile_manifest_cannot_write_outside_the_folder(run: Run, tmp_path: Path, file_repo: Path) -> None:
    """File names from the store are names, never paths, even where every digest is right."""
    key = "manifests/000000000002-000001.json"
    good = manifest.decode_manifest((file_repo / key).read_bytes(), key)
    entry = good.records[0]
    index = indexes.decode_index((file_repo / entry.key).read_bytes(), entry)
    index = msgspec.structs.replace(index, name="../../evil", skeleton={"file": "../../evil"})
    digest, raw_length, stored = indexes.encode_index(index)
    entry = msgspec.structs.replace(
        entry, name=index.name, digest=digest, raw_length=raw_length, stored_length=len(stored)
    )
    (file_repo / entry.key).write_bytes(stored)
    (file_repo / key).write_bytes(manifest.encode_manifest(msgspec.structs.replace(good, records=(entry,))))
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    run("restore", file_repo, "--epoch", 2, "--to", tmp_path / "a" / "b" / "c")
    new = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert all(path.parent == tmp_path / "a" / "b" / "c" for path in new)


# ---- verify ----------------------------------------------------------------------------------------------------


def test_verify_of_a_sound_repository(run: Run, state_repo: Path) -> None:
    """A sound repository verifies with exit code 0, in words and in JSON."""
    result = run("verify", state_repo)
    assert result.code == 0
    assert "intact" in result.out
    assert "every byte read" in result.out
    found = run("verify", state_repo, "--epoch", 2, "--json").json
    assert (found["ok"], [health["epoch"] for health in found["epochs"]]) == (True, [2])


def test_verify_names_each_damaged_object(run: Run, state_repo: Path) -> None:
    """Damage is a table that names epoch, object and reason, and exit code 4; ``--quick`` reads no chunk."""
    [chunk] = chunks_of(state_repo, 3)
    flip(chunk)
    result = run("verify", state_repo)
    assert result.code == 4
    assert chunk.relative_to(state_repo).as_posix() in result.out
    quick = run("verify", state_repo, "--quick", "--json")
    assert (quick.code, quick.json["deep"]) == (0, False)
    chunk.unlink()
    gone = run("verify", state_repo, "--quick", "--json")
    assert gone.code == 4
    assert gone.json["epochs"][-1]["problems"] == [
        {"key": chunk.relative_to(state_repo).as_posix(), "reason": "is missing"}
    ]


# ---- preflight -------------------------------------------------------------------------------------------------


def test_preflight_tells_whether_a_save_would_work(run: Run, state_repo: Path, files: dict[str, Path]) -> None:
    """Of bytes or files, in a repository; exit code 5 if it will not fit, with the reason."""
    good = run("preflight", state_repo, *files.values())
    assert good.code == 0
    assert good.out.startswith("ok")
    assert "conditional puts        honoured" in good.out
    answer = run("preflight", state_repo, "--bytes", 10**15, "--json")
    assert answer.code == 5
    assert (answer.json["ok"], answer.json["bytes_state"]) == (False, 10**15)
    assert "are free" in answer.json["reason"]
    bad = run("preflight", state_repo, "--bytes", 10**15)
    assert bad.out.startswith("not ok")
    assert "on_full" not in bad.out


def test_preflight_of_a_place_that_has_no_repository_yet(run: Run, tmp_path: Path) -> None:
    """It says whether one could be made, and leaves no file."""
    answer = run("preflight", tmp_path / "new", "--json")
    assert (answer.code, answer.json["writable"]) == (0, True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_preflight_of_files_that_are_not_there(run: Run, state_repo: Path) -> None:
    """A mistyped name is said, and so is a question that contradicts itself."""
    assert run("preflight", state_repo, "no-such-file").code == 3
    assert run("preflight", state_repo, "x", "--bytes", 5).code == 1
    assert run("preflight", state_repo, "--bytes", -5).code == 1


def test_verify_a_sample(run: Run, state_repo: Path) -> None:
    """``--sample`` takes a share or per cent, says so, and refuses what is none."""
    assert "5% of the chunks read" in run("verify", state_repo, "--sample", "5%").out
    assert run("verify", state_repo, "--sample", "0.5", "--json").json["sample"] == 0.5
    for wrong in ("0", "101%", "x", "-1", "nan"):
        assert run("verify", state_repo, "--sample", wrong).code == 1
    assert run("verify", state_repo, "--sample", "5%", "--quick").code == 1
