"""Stages of a build that survive an interruption.

A stage's files are made in the private cache, under the digest of the build's inputs. A finished stage has a receipt
with its files' hashes; the next build of the same inputs checks them and continues after that stage. The finished
engine gets hard links to the stages' files, so weights are written once; only a cache on another file system costs a
copy. Then the cache entry is removed, so the cache only holds files of unfinished builds. The next build drops entries
that have not been touched for a week.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvc_trt.engine.files import sha256
from kvc_trt.engine.manifest import FileRecord, Receipt, canonical, strict_json
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.files.atomic import disk_error, make_durable, write_durably
from kvc_trt.files.cache import cache_root
from kvc_trt.files.inputs import read_input
from kvc_trt.files.unfinished import locked
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.validation import validated_document

LARGEST_RECEIPT = 1 << 20
KEEP_SECONDS = 7 * 24 * 3600


class Stages:
    """The stages of one build; use as `with Stages.open(digest) as stages`."""

    def __init__(self, directory: Path, digest: str, progress: Progress) -> None:
        self.directory = directory
        self.receipts: list[Receipt] = []
        self.resumed: list[str] = []
        self._digest = digest
        self._progress = progress

    @classmethod
    @contextlib.contextmanager
    def open(cls, digest: str, progress: Progress | None = None) -> Iterator[Stages]:
        """Open and lock the cache entry of `digest`.

        Raises UnsupportedEnvironment if another process is building the same inputs.
        """
        root = cache_root() / "stages"
        root.mkdir(mode=0o700, exist_ok=True)
        directory = root / digest
        with _locked_entry(directory):
            os.utime(directory)
            _drop_old_entries(root)
            stages = cls(directory, digest, progress or NullProgress())
            try:
                yield stages
            except BaseException:
                if stages.receipts:
                    kept = ", ".join(receipt.name for receipt in stages.receipts)
                    stages._progress.note(f"finished stages are kept for the next build: {kept}")
                raise
            finally:
                stages._clear_partial()
                with contextlib.suppress(OSError):
                    directory.rmdir()  # succeeds only where no stage was finished

    def run(self, name: str, file: str, make: Callable[[Path], None]) -> None:
        """Make `file` with `make(path)`, or keep the intact one of an earlier build with the same inputs.

        Raises UnsupportedEnvironment if the disk is full; no unfinished file is left.
        """
        receipt = self._finished(name, file)
        if receipt is not None:
            self.receipts.append(receipt)
            self.resumed.append(name)
            self._progress.note(f"{name}: finished by an earlier build, kept")
            return
        self._clear_partial()
        partial = self.directory / "partial"
        (partial / file).parent.mkdir(mode=0o700, parents=True)
        started = time.monotonic()
        try:
            make(partial / file)
            record = FileRecord(sha256(partial / file), (partial / file).stat().st_size)
            make_durable(partial / file)
            (self.directory / file).parent.mkdir(mode=0o700, exist_ok=True)
            os.rename(partial / file, self.directory / file)
            seconds = round(time.monotonic() - started, 3)
            receipt = Receipt(
                name=name, inputs=self._digest, seconds=seconds, peak_rss_bytes=peak_rss_bytes(), files={file: record}
            )
            self._receipt_path(name).unlink(missing_ok=True)
            write_durably(self._receipt_path(name), canonical(receipt.model_dump()))
        except OSError as error:
            raise disk_error(error, f"building {name}") from error
        self.receipts.append(receipt)

    def discard(self) -> None:
        """Remove the cache entry once its files are in the engine."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _finished(self, name: str, file: str) -> Receipt | None:
        source, path = self._receipt_path(name), self.directory / file
        try:
            content = read_input(source, LARGEST_RECEIPT, follow_links=False)
            receipt = validated_document(Receipt, strict_json(content, source), str(source))
            if (receipt.name, receipt.inputs, [*receipt.files]) != (name, self._digest, [file]):
                return None
            record = receipt.files[file]
            whole = path.lstat().st_size == record.size and sha256(path) == record.sha256
        except (OSError, InputError):
            return None
        return receipt if whole else None

    def _receipt_path(self, name: str) -> Path:
        return self.directory / f"{name}.receipt.json"

    def _clear_partial(self) -> None:
        shutil.rmtree(self.directory / "partial", ignore_errors=True)


def drop_entry(digest: str) -> None:
    """Remove the stages of a finished engine that a killed build left, unless another build is working on them."""
    directory = cache_root() / "stages" / digest
    with contextlib.suppress(OSError), locked(directory):
        shutil.rmtree(directory, ignore_errors=True)


def peak_rss_bytes() -> int:
    """Return the peak resident size of this process so far, in bytes (Linux reports KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def _locked_entry(directory: Path) -> Iterator[None]:
    """Hold the lock of a cache entry, which is made if it does not exist."""
    with contextlib.ExitStack() as lock:
        while True:
            directory.mkdir(mode=0o700, exist_ok=True)
            try:
                lock.enter_context(locked(directory))
                break
            except FileNotFoundError:  # another process has just dropped an old one
                continue
            except BlockingIOError as error:
                message = f"another process is building the same engine (it holds {directory})"
                raise UnsupportedEnvironment(message, hint="wait for it, then repeat the command") from error
        yield


def _drop_old_entries(root: Path) -> None:
    """Remove entries that were not used for a week; an entry dated in the future by a wrong clock ages from now on."""
    now = time.time()
    for entry in root.iterdir():
        with contextlib.suppress(OSError), locked(entry):
            age = now - entry.stat().st_mtime
            if age > KEEP_SECONDS:
                shutil.rmtree(entry, ignore_errors=True)
            elif age < 0:
                os.utime(entry)
