"""Find, fingerprint and load the libraries with the plugins.

A plugin library is executable code. It is taken only from the package or from an absolute path given by the user; an
engine runs with the same file it was built with, identified by its SHA-256.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvc_trt.backends.tensorrt.python_plugins import register
from kvc_trt.backends.trusted_files import check_writers
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.files.inputs import sha256_of_input
from kvc_trt.kernels.loading import VARIABLE as KERNELS_VARIABLE
from kvc_trt.kernels.loading import library_path as kernel_library_path
from kvc_trt.operators import KVC_DOMAIN

if TYPE_CHECKING:
    import tensorrt

    from kvc_trt.backends.tensorrt.module import TensorRT

VARIABLE = "KVC_TRT_PLUGINS"
PACKAGED = Path(__file__).resolve().parents[2] / "lib" / "libkvc_plugins.so"
BUILD_HINT = f"make plugins (with TENSORRT_ROOT set), then {VARIABLE}=$PWD/build/libkvc_plugins.so"

Kind = Literal["plugins", "python"]


@dataclass(frozen=True)
class PluginLibrary:
    """A library file with the plugins."""

    kind: Kind
    """"plugins": the C++ plugins. "python": only the kernels, called by the Python plugins."""
    path: Path
    sha256: str
    abi: int | None = None
    """Version of the kernels' C ABI; None until the library is loaded."""
    executor: str | None = None
    """"cuda", or "emulation" for a CPU; None until the library is loaded."""

    def record(self) -> dict[str, Any]:
        """Return its record for the manifest's `target.plugins`."""
        return {"file": self.path.name, "sha256": self.sha256, "abi": self.abi}


def find_libraries(*, ask: bool) -> tuple[PluginLibrary, ...]:
    """Return every library with the plugins on this machine, the C++ one first.

    Owner and mode are checked and the fingerprint is taken. With `ask` each is then loaded for its ABI: only to choose
    one for a build, never before an engine's manifest is compared. InputError or UnsupportedEnvironment if the user
    named a library that is missing or not trusted.
    """
    found: list[PluginLibrary] = []
    if (plugins := named_path(os.environ.get(VARIABLE), PACKAGED)) is not None:
        found.append(fingerprint(plugins, "plugins"))
    if (kernels := kernel_library_path()) is not None:
        found.append(fingerprint(kernels[0], "python"))
    return tuple(map(asked, found)) if ask else tuple(found)


def named_path(named: str | None, packaged: Path) -> Path | None:
    """Return the user's path, or else the packaged one if it exists. InputError for a relative path."""
    if named:
        if not os.path.isabs(named):
            raise InputError(f"{VARIABLE} is {named!r}: expected an absolute path")
        return Path(named)
    return packaged if packaged.is_file() else None


def fingerprint(path: Path, kind: Kind) -> PluginLibrary:
    """Hash a library file without executing it."""
    check_trusted(path)
    return PluginLibrary(kind, path, sha256_of_input(path.resolve(), follow_links=False))


def asked(library: PluginLibrary) -> PluginLibrary:
    """Load the library and return it with its ABI and executor."""
    try:
        loaded = ctypes.CDLL(str(library.path.resolve()), mode=ctypes.RTLD_LOCAL)
        loaded.kvc_executor.restype = ctypes.c_char_p
        abi, executor = int(loaded.kvc_abi_version()), loaded.kvc_executor().decode("ascii", "replace")
    except (OSError, AttributeError) as error:
        raise UnsupportedEnvironment(f"{library.path} is no plugin library: {error}", hint=BUILD_HINT) from error
    return replace(library, abi=abi, executor=executor)


def check_trusted(path: Path) -> None:
    """Raise UnsupportedEnvironment unless only this user and root can change the file and its folder."""
    try:
        real = path.resolve(strict=True)
    except OSError as error:
        raise UnsupportedEnvironment(f"{path}: expected a plugin library, found nothing", hint=BUILD_HINT) from error
    if not real.is_file():
        raise UnsupportedEnvironment(f"{path}: expected a plugin library, found no regular file", hint=BUILD_HINT)
    check_writers(real)


@dataclass(frozen=True)
class LoadedPlugins:
    """Plugins in TensorRT's registry; the object must outlive everything that is built or run with them."""

    names: frozenset[str]
    """The names of our operators in the registry."""
    keep: Any
    """The library's handle, or the registration of the Python plugins."""


_loaded: dict[tuple[str, PluginLibrary], LoadedPlugins] = {}


def load_plugins(library: PluginLibrary, trt: TensorRT) -> LoadedPlugins:
    """Register the library's plugins with TensorRT, once per process.

    UnsupportedEnvironment if TensorRT refuses: it returns None for a missing file, a file without plugins, and plugins
    that are already registered.
    """
    module: Any = trt
    key = (str(module.__name__), library)
    if key not in _loaded:
        _loaded[key] = _load(library, module)
    return _loaded[key]


def _load(library: PluginLibrary, module: Any) -> LoadedPlugins:
    registry: tensorrt.IPluginRegistry = module.get_plugin_registry()
    if library.kind == "python":
        registration = register(registry, module)
        return LoadedPlugins(registration.names, registration)
    path = str(library.path.resolve())
    handle = registry.load_library(path)
    if handle is None:
        raise UnsupportedEnvironment(
            f"TensorRT {module.__version__} does not load {path}: expected one with getCreators, none loaded before",
            hint=f"{BUILD_HINT}; {KERNELS_VARIABLE} names a kernel library for the plugins in Python",
        )
    names = frozenset(str(c.name) for c in registry.all_creators if c.plugin_namespace == KVC_DOMAIN)
    return LoadedPlugins(names, handle)
