"""How the demo tells what it does: short, within eighty columns, with figures."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from ckptstore.cli._demo_checks import Compared, Flipped, Pruned
from ckptstore.cli._demo_model import Shape
from ckptstore.cli._demo_supervisor import Event, Kill, Log
from ckptstore.cli._format import clean, ratio, short_key, size, sparkline

_GOOD, _BAD, _MORE = ("✓", "bold green"), ("✗", "bold red"), (" ", "")


class Story:
    """Prints the story as it happens. A context manager: a spinner runs while it is open, on a terminal.

    Args:
        quiet: stdout belongs to JSON: tell nothing, spin on stderr.
    """

    def __init__(self, shape: Shape, place: str, *, temporary: bool, keep: bool, quiet: bool) -> None:
        self._shape = shape
        self._quiet = quiet
        self._place, self._keep = place, keep
        self._kills = 0
        self._acts = 0
        self._retrying: Kill | None = None
        stream = sys.stderr if quiet else sys.stdout
        self._console = Console(file=stream, highlight=False, width=None if stream.isatty() else 80, soft_wrap=True)
        self._status: Status | None = None
        self._say(Text.assemble(("ckptstore demo", "bold"), f"  seed {shape.seed}, in {clean(place)}"))
        fate = "Kept." if keep else "Removed at the end."
        self._say(Text("A small language model in NumPy learns Python's manual, letter by letter:", "dim"))
        self._say(Text(f"two hidden layers, Adam, warm-up and cosine. {fate}", "dim"))
        self._say(Text("Three lines of its loop do it: open(url), latest(deep=True), save(epoch, state).", "dim"))

    def __enter__(self) -> Story:
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    # ---- while it happens ----------------------------------------------------------------------------------

    def notice(self, event: Event) -> None:
        """Something happened in a run: show it, in passing or as a line of the story."""
        what = event["event"]
        if what == "killed":
            self._killed(event["kill"])
        elif what == "saved" and self._retrying is not None and self._retrying.epoch == event["epoch"]:
            self._resumed(self._retrying)
            self._retrying = None
        if self._status is not None and what in ("resumed", "save", "saved"):
            doing, epoch = ("saving", event["epoch"]) if what == "save" else ("training", event["epoch"] + 1)
            self._status.update(f"{doing} epoch {min(epoch, self._shape.epochs)} of {self._shape.epochs}")

    def _killed(self, kill: Kill) -> None:
        self._kills += 1
        self._retrying = kill
        self._line(_BAD, f"SIGKILL {kill.after:.2f} s into the save of epoch {kill.epoch}, {kill.done:.0%} of it done.")
        whole = {2: "epoch 1 is", 3: "epochs 1 and 2 are"}.get(kill.epoch, f"epochs 1 to {kill.epoch - 1} are")
        debris = f"{size(kill.left_bytes)} of debris in {kill.left_objects} objects"
        self._line(_MORE, f"On the store: {whole} whole; {debris}.")

    def _resumed(self, kill: Kill) -> None:
        again = f"{kill.epoch} trained again in {kill.retrained:.1f} s"
        self._line(_GOOD, f"Resumed from epoch {kill.resumed}; {again}, the same to the last bit.")
        found, sent = size(kill.bytes_reused), size(kill.bytes_sent)
        self._line(_MORE, f"Its save found {found} of the state there already and sent {sent}.")

    # ---- acts ----------------------------------------------------------------------------------------------

    def act(self, title: str) -> None:
        """A heading."""
        self._acts += 1
        self._say(Text())
        self._say(Text.assemble((f"{self._acts}  ", "bold cyan"), (title, "bold")))
        if self._status is not None:
            self._status.update(title.lower())

    def undisturbed(self, log: Log) -> None:
        """How the run went that nobody killed."""
        losses = [log.losses[epoch] for epoch in sorted(log.losses)]
        saves = list(log.saves.values())
        state, stored = saves[-1]["bytes_state"], saves[-1]["bytes_stored"]
        seconds = sorted(save["seconds"] for save in saves)[len(saves) // 2]
        curve = f"loss {losses[0]:.2f} {sparkline(losses)} {losses[-1]:.2f}"
        self._line(_GOOD, f"{curve} in {len(losses)} epochs, {log.seconds:.1f} s")
        sizes = f"{size(state)} as {size(stored)} (ratio {ratio(state, stored)})"
        self._line(_GOOD, f"{len(saves)} saves of {sizes}, {seconds:.2f} s each")

    def killed(self, log: Log) -> None:
        """How the other run got there all the same."""
        again = sum(kill.retrained for kill in log.kills)
        late = f" ({log.too_late} more came too late to hit a save)" if log.too_late else ""
        took = f"finished in {log.seconds:.1f} s, {again:.1f} s of it trained twice"
        self._line(_GOOD, f"{len(log.kills)} kills{late}; {took}")

    def compared(self, compared: Compared) -> None:
        """The two runs, side by side."""
        self._line(_GOOD, f"final state: {compared.arrays} arrays, {size(compared.nbytes)}; not one bit differs")
        self._line(_GOOD, f"all {self._shape.epochs} epochs: the digests taken in the trainers' memory are equal")

    def flipped(self, flipped: Flipped) -> None:
        """The damage."""
        where = f"byte {flipped.byte} of {short_key(flipped.key)} (epoch {flipped.epoch})"
        self._line(_BAD, f"bit {flipped.bit} of {where}")

    def noticed(self, flipped: Flipped) -> None:
        """What was noticed of it."""
        self._line(_GOOD, f"load() of epoch {flipped.epoch} raises CorruptionError and names that object")
        self._line(_GOOD, f"latest(deep=True) steps back to epoch {flipped.stepped_back_to} and says why: that object")
        self._line(_MORE, flipped.reason.replace(flipped.key, "").strip())

    def repaired(self, flipped: Flipped) -> None:
        """What the trainer made of it."""
        at = flipped.epoch
        self._line(_GOOD, f"the trainer resumed from {at - 1}, trained {at} again and replaced it: equal again")

    def pruned(self, pruned: Pruned) -> None:
        """What was left."""
        kept = " and ".join(map(str, pruned.kept))
        self._line(_GOOD, f"epochs {kept} kept, every byte verified: {size(pruned.bytes_left)} on the store")
        freed = f"{len(pruned.removed)} epochs removed: {pruned.objects} objects, {size(pruned.bytes_freed)}"
        self._line(_GOOD, f"{freed}; no debris left")

    def end(self, seconds: float) -> None:
        """The moral."""
        self._say(Text())
        told = f"{self._kills} kills, 1 flipped bit, no epoch lost, no bit different. {seconds:.0f} s."
        self._say(Text.assemble(("Lost: nothing. ", "bold green"), told))
        if self._keep:
            self._say(Text(f"Look at it: ckptstore ls {clean(self._place)}/killed"))

    def _line(self, mark: tuple[str, str], text: str) -> None:
        self._say(Text.assemble("   ", mark, " ", clean(text)))

    def _say(self, text: Any) -> None:
        if not self._quiet:
            self._console.print(text)
