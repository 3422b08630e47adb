"""Find a tritonserver on this machine, and the environment that it needs to run Python models.

The wheel `nvidia-pytriton`, which `make triton-env` installs, holds a whole server, but not in the layout of a backend
directory, and its Python models need the shared library of their environment's Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvc_trt.errors import UnsupportedEnvironment

ENVIRONMENT = "KVC_TRT_TRITON"
"""The variable with the path of the environment of `make triton-env`, if that is not build/triton."""
INSTALL = "make triton-env"
_LIBRARY = "import sysconfig as s; print(s.get_config_var('Py_ENABLE_SHARED'), s.get_config_var('LIBDIR'))"


@dataclass(frozen=True)
class Installation:
    """A tritonserver that can be started."""

    server: Path
    environment: Path | None = None
    """The virtual environment that holds the server; None for one on the PATH, which has its own Python backend."""

    def arguments(self, directory: Path) -> list[str]:
        """Return the beginning of the server's command line; its backend directory is made in `directory`."""
        if self.environment is None:
            return [str(self.server)]
        return [str(self.server), f"--backend-directory={_backends(self.environment, self.server, directory)}"]

    def variables(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the server's environment variables: those `given`, and those by which its models find their Python.

        Raises UnsupportedEnvironment if that Python has no shared library.
        """
        if self.environment is None:
            return dict(given)
        library = _shared_library(self.environment)
        path = f"{self.environment / 'bin'}:{given.get('PATH', '/usr/bin:/bin')}"
        libraries = ":".join(filter(None, (str(library), given.get("LD_LIBRARY_PATH"))))
        return {**given, "PATH": path, "LD_LIBRARY_PATH": libraries}


def find_triton(given: Mapping[str, str] | None = None) -> Installation:
    """Return a tritonserver of this machine; UnsupportedEnvironment, with the command to install one, if there is none.

    It searches $KVC_TRT_TRITON alone if that is set; otherwise the running environment, build/triton, and the PATH.
    `given` are the environment variables (None: this process's).
    """
    variables = os.environ if given is None else given
    chosen = variables.get(ENVIRONMENT)
    places = [Path(chosen)] if chosen else [Path(sys.prefix), Path("build") / "triton"]
    for place in places:
        for server in sorted(place.glob("lib/python3.*/site-packages/pytriton/tritonserver/bin/tritonserver")):
            return Installation(server.absolute(), place.absolute())
    on_path = shutil.which("tritonserver", path=variables.get("PATH", ""))
    if on_path is not None and not chosen:
        return Installation(Path(on_path))
    looked = f"in {chosen}, which ${ENVIRONMENT} names" if chosen else f"in {places[0]}, in {places[1]} and on the PATH"
    raise UnsupportedEnvironment(f"no tritonserver was found: looked {looked}", hint=INSTALL)


def _shared_library(environment: Path) -> Path:
    """Return the directory of libpython of an environment's Python; UnsupportedEnvironment if it has none."""
    python = environment / "bin" / "python"
    try:
        said = subprocess.run([python, "-c", _LIBRARY], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UnsupportedEnvironment(f"{python} does not run", hint=INSTALL) from error
    shared, directory = said.split(maxsplit=1)
    if shared != "1":
        raise UnsupportedEnvironment(
            f"{python} has no shared libpython, which Triton's Python models need",
            hint=f"{INSTALL} TRITON_PYTHON=PYTHON, with a Python that was built with --enable-shared",
        )
    return Path(directory.strip())


def _backends(environment: Path, server: Path, directory: Path) -> Path:
    """Make a backend directory with the Python backend and the program that runs models in the environment's Python."""
    root = server.parents[1]
    version = server.parents[4].name.removeprefix("python")
    python = directory / "backends" / "python"
    python.mkdir(parents=True)
    for file in (
        root / "backends" / "python" / "libtriton_python.so",
        root / "backends" / "python" / "triton_python_backend_utils.py",
        root / "python_backend_stubs" / version / "triton_python_backend_stub",
    ):
        if not file.exists():
            raise UnsupportedEnvironment(f"{file} is missing from {environment}", hint=INSTALL)
        (python / file.name).symlink_to(file)
    return python.parent
