"""A simulated power cut: a journal of what was synced, and the function that puts a folder back to that.

The journal lies beside the data folder (`<folder>.powercut`). It is plain text, one write per event, so it
survives kill -9 of the process that writes it. `cut_power` replays it over a small model of a file system: every folder
has the names that a program sees and the names that were synced; every file has the length that was synced.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import threading
from pathlib import Path

from semel.storage.files import DiskFiles

_SUFFIX = ".powercut"
_SEPARATOR = "\t"
_DONE_IF_GONE = frozenset({"rename", "remove", "remove_dir"})
_DONE_IF_THERE = frozenset({"create", "make_dir"})


class Journal:
    """Appends events. Thread-safe: fsyncs are noted from the threads that do them."""

    def __init__(self, root: Path, side: Path, next_kept: int) -> None:
        self._root = root
        self._side = side
        self._kept_numbers = itertools.count(next_kept)
        self._lock = threading.Lock()
        self._fd = os.open(side / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        # How many there are: a sync of a folder that begins now covers these and no more.
        self.events = (side / "journal").read_bytes().count(b"\n")

    @classmethod
    def open(cls, data_dir: str | Path) -> Journal:
        """Goes on with the journal of the folder, or starts one: what is there already counts as safe."""
        root = Path(data_dir).absolute()
        side = side_folder(root)
        if not side.exists():
            root.mkdir(parents=True, exist_ok=True)
            (side / "kept").mkdir(parents=True)
            (side / "journal").write_text("".join(f"{line}\n" for line in _baseline(root)))
        return cls(root, side, len(os.listdir(side / "kept")))

    def note(self, event: str, path: str, *details: str) -> None:
        names = [os.path.relpath(path, self._root)]
        if event == "rename":
            names.append(os.path.relpath(details[0], self._root))
            details = details[1:]
        line = _SEPARATOR.join([event, *names, *details]) + "\n"
        with self._lock:
            os.write(self._fd, line.encode())
            self.events += 1

    def keep(self, path: str) -> str:
        """Saves a file that is about to lose its name, so that a power cut can bring it back."""
        with self._lock:
            number = str(next(self._kept_numbers))
        os.link(path, self._side / "kept" / number)
        return number


def side_folder(data_dir: str | Path) -> Path:
    root = Path(data_dir).absolute()
    return root.with_name(root.name + _SUFFIX)


def _baseline(root: Path) -> list[str]:
    lines = []
    for folder, folders, files in os.walk(root):
        place = os.path.relpath(folder, root)
        lines += [_SEPARATOR.join(["make_dir", os.path.normpath(os.path.join(place, name))]) for name in folders]
        for name in files:
            path = os.path.normpath(os.path.join(place, name))
            size = os.path.getsize(os.path.join(folder, name))
            lines.append(_SEPARATOR.join(["found", path, str(size)]))
        lines.append(_SEPARATOR.join(["sync_dir", place, str(2**62)]))
    return lines


class _File:
    def __init__(self, place: str) -> None:
        self.place = place  # where its bytes are now, relative to the data folder; "" once it only lives in `kept`
        self.kept = ""
        self.synced_length = 0
        self.touched = False  # written through the journal; a file that never was is somebody else's and stays whole


class _Folder:
    def __init__(self) -> None:
        self.seen: dict[str, _File | _Folder] = {}
        self.synced: dict[str, _File | _Folder] = {}
        self.changed: dict[str, int] = {}  # name -> number of the event that last changed it


class _Model:
    """The journal replayed: what programs saw, and what was on the disk."""

    def __init__(self) -> None:
        self.root = _Folder()
        self._number = 0

    def replay(self, lines: list[str]) -> None:
        for number, line in enumerate(lines):
            self._number = number
            event, *details = line.split(_SEPARATOR)
            getattr(self, f"_{event}")(*details)

    def keep_some_names(self, luck: random.Random) -> None:
        """Names that were changed before a random moment survive although no sync included them."""
        moment = max(0, self._number + 1 - int(luck.expovariate(1 / 40)))  # most often among the last few
        folders = [self.root]
        for folder in folders:
            _settle_names(folder, moment)
            folders += [node for node in folder.synced.values() if isinstance(node, _Folder)]

    def _folder(self, path: str) -> _Folder:
        node: _Folder | _File = self.root
        for part in Path(path).parts:
            assert isinstance(node, _Folder)
            node = node.seen[part]
        assert isinstance(node, _Folder)
        return node

    def _parent(self, path: str) -> tuple[_Folder, str]:
        parent, name = os.path.split(path)
        folder = self._folder(parent)
        folder.changed[name] = self._number
        return folder, name

    def _file(self, path: str) -> _File | None:
        parent, name = os.path.split(path)
        node = self._folder(parent).seen.get(name)
        return node if isinstance(node, _File) else None

    def _found(self, path: str, size: str) -> None:
        self._create(path)
        file = self._file(path)
        assert file is not None
        file.synced_length, file.touched = int(size), False

    def _create(self, path: str) -> None:
        folder, name = self._parent(path)
        file = folder.seen[name] = _File(path)
        file.touched = True

    def _touch(self, path: str) -> None:
        file = self._file(path)
        if file is None:  # made by somebody who does not keep this journal: from here on it is ours
            self._create(path)
        else:
            file.touched = True

    def _make_dir(self, path: str) -> None:
        folder, name = self._parent(path)
        folder.seen[name] = _Folder()

    def _sync(self, path: str, size: str) -> None:
        file = self._file(path)
        if file is not None:  # renamed or removed while its sync ran
            file.synced_length = max(file.synced_length, int(size))

    def _truncate(self, path: str, size: str) -> None:
        file = self._file(path)
        if file is not None:
            file.synced_length = min(file.synced_length, int(size))

    def _sync_dir(self, path: str, mark: str) -> None:
        _settle_names(self._folder(path), int(mark))

    def _rename(self, old: str, new: str, kept: str) -> None:
        source, old_name = self._parent(old)
        target, new_name = self._parent(new)
        replaced = target.seen.get(new_name)
        if isinstance(replaced, _File):
            replaced.place, replaced.kept = "", kept
        node = source.seen.pop(old_name)
        target.seen[new_name] = node
        _move(node, new)

    def _remove(self, path: str, kept: str) -> None:
        folder, name = self._parent(path)
        node = folder.seen.pop(name)
        assert isinstance(node, _File)
        node.place, node.kept = "", kept

    def _remove_dir(self, path: str) -> None:
        folder, name = self._parent(path)
        folder.seen.pop(name)


def _settle_names(folder: _Folder, mark: int) -> None:
    """The changes of names before an event are on the disk."""
    for name, number in list(folder.changed.items()):
        if number < mark:
            del folder.changed[name]
            if name in folder.seen:
                folder.synced[name] = folder.seen[name]
            else:
                folder.synced.pop(name, None)


def _move(node: _File | _Folder, place: str) -> None:
    if isinstance(node, _File):
        node.place = place
    else:
        for name, child in node.seen.items():
            _move(child, os.path.join(place, name))


def cut_power(data_dir: str | Path, luck: random.Random | None = None) -> int:
    """Puts the folder back to what was synced; returns how many written bytes were lost. Its process must be gone.

    With `luck`, a random part of what was not synced survives, as it may on a real disk: of each file, sometimes as
    it was written, sometimes as zeros; and of the names.
    """
    root = Path(data_dir).absolute()
    side = side_folder(root)
    model = _Model()
    model.replay(_that_happened((side / "journal").read_text().splitlines(), root))
    if luck is not None:
        model.keep_some_names(luck)
    after = root.with_name(root.name + ".after")
    shutil.rmtree(after, ignore_errors=True)
    lost_bytes = _Restorer(root, side / "kept", luck).restore(model.root, after, "")
    shutil.rmtree(root)
    after.rename(root)
    shutil.rmtree(side)
    return lost_bytes


def _that_happened(lines: list[str], root: Path) -> list[str]:
    """Without the event that was noted but not done when the process was killed: events are noted first."""
    happened = list(lines)
    later: set[str] = set()
    for number in range(len(lines) - 1, -1, -1):
        event, path, *details = lines[number].split(_SEPARATOR)
        if event in _DONE_IF_GONE or event in _DONE_IF_THERE:
            if path not in later and os.path.lexists(root / path) != (event in _DONE_IF_THERE):
                happened[number] = ""
            later.add(path)
            if event == "rename":
                later.add(details[0])
    return [line for line in happened if line]


class _Restorer:
    """Builds the folder anew from the names that were synced."""

    def __init__(self, root: Path, kept: Path, luck: random.Random | None) -> None:
        self._root = root
        self._kept = kept
        self._luck = luck

    def restore(self, folder: _Folder, target: Path, place: str) -> int:
        target.mkdir()
        for path in _strangers(folder, self._root / place):
            shutil.copyfile(path, target / path.name)
        lost_bytes = self._nameless_bytes(folder)
        for name, node in folder.synced.items():
            if isinstance(node, _Folder):
                lost_bytes += self.restore(node, target / name, _place_of(node, folder, place))
            else:
                lost_bytes += self._restore_file(node, target / name)
        return lost_bytes

    def _restore_file(self, file: _File, target: Path) -> int:
        source = self._root / file.place if file.place else self._kept / file.kept
        content = source.read_bytes()
        safe = file.synced_length if file.touched else len(content)
        survives = content[:safe] + _survivors(content[safe:], self._luck)
        target.write_bytes(survives)
        return len(content) - len(survives)

    def _nameless_bytes(self, folder: _Folder) -> int:
        """Files and folders whose names were never synced are lost as a whole."""
        return sum(self._bytes_in(node) for name, node in folder.seen.items() if name not in folder.synced)

    def _bytes_in(self, node: _File | _Folder) -> int:
        if isinstance(node, _Folder):
            return sum(map(self._bytes_in, node.seen.values()))
        path = self._root / node.place
        return path.stat().st_size if path.exists() else 0


def _strangers(folder: _Folder, place: Path) -> list[Path]:
    """Files that were never written through the journal: it can't say what a power cut does to them."""
    known = {name for name, node in folder.seen.items() if isinstance(node, _File)}
    return [path for path in place.iterdir() if path.is_file() and path.name not in known] if place.is_dir() else []


def _place_of(node: _Folder, parent: _Folder, place: str) -> str:
    """Where a folder is now: its renaming may not have been synced."""
    return next((os.path.join(place, name) for name, seen in parent.seen.items() if seen is node), "?")


def _survivors(unsynced: bytes, luck: random.Random | None) -> bytes:
    if luck is None or not unsynced:
        return b""
    part = unsynced[: luck.randint(0, len(unsynced))]
    return part if luck.random() < 0.7 else bytes(len(part))


# --- the files that write the journal ---
class JournaledFiles(DiskFiles):
    """The same files, with a journal beside the data folder of everything that a power cut would take back."""

    def __init__(self, data_dir: str | Path, *, real_sync: bool = True) -> None:
        self._journal = Journal.open(data_dir)
        self._real_sync = real_sync  # False: the journal alone stands for the disk, for fast tests

    def open(self, path: str, *, create: bool = True) -> int:
        exists = os.path.exists(path)
        if exists or create:
            self._journal.note("touch" if exists else "create", path)
        return super().open(path, create=create)

    def sync_file(self, fd: int, path: str) -> None:
        size = os.fstat(fd).st_size  # before the sync: what is written while it runs may not be covered
        if self._real_sync:
            super().sync_file(fd, path)
        self._journal.note("sync", path, str(size))

    def sync_dir(self, path: str) -> None:
        mark = self._journal.events
        if self._real_sync:
            super().sync_dir(path)
        self._journal.note("sync_dir", path, str(mark))

    def sync_all(self, folder: str) -> None:
        files = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
        sizes = [(path, os.path.getsize(path)) for path in files]
        if self._real_sync:
            super().sync_all(folder)
        for path, size in sizes:
            self._journal.note("sync", path, str(size))
        for place, _, _ in os.walk(folder):
            self._journal.note("sync_dir", place, str(self._journal.events))

    def truncate(self, fd: int, path: str, size: int) -> None:
        if size < os.fstat(fd).st_size:
            self._journal.note("truncate", path, str(size))
        super().truncate(fd, path, size)

    def make_dir(self, path: str) -> None:
        self._journal.note("make_dir", path)
        super().make_dir(path)

    def rename(self, old: str, new: str) -> None:
        kept = self._journal.keep(new) if os.path.isfile(new) else ""
        self._journal.note("rename", old, new, kept)
        super().rename(old, new)

    def remove(self, path: str) -> None:
        self._journal.note("remove", path, self._journal.keep(path))
        super().remove(path)

    def remove_dir(self, path: str) -> None:
        self._journal.note("remove_dir", path)
        super().remove_dir(path)
