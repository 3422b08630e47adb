"""Fetching a checkpoint from the Hugging Face Hub, and the commit it resolved to; pickled weights are not fetched."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvc_trt.errors import InputError, KvcError, UnsupportedEnvironment
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.models.family import DType
from kvc_trt.models.sources.checkpoint import usual_dtype
from kvc_trt.models.sources.safetensors_file import DTYPES
from kvc_trt.models.sources.tokenizer import TOKENIZER_FILES

FILES = ("config.json", "*.safetensors", "model.safetensors.index.json", *TOKENIZER_FILES)
WAYS_OUT = "--checkpoint PATH takes a local Hugging Face directory or GGUF file, --random-weights SEED needs none"
_TIMEOUT_SECONDS = 10.0
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def is_repository(model: str) -> bool:
    """True if this can be the name of a repository, ORGANISATION/NAME. It may be a path as well."""
    return _REPOSITORY.fullmatch(model) is not None and ".." not in model


def ways_out_of(repo_id: str) -> str:
    """Return the hint for a repository that was given as `--model` and cannot be downloaded."""
    return f"hf download {repo_id} on a machine with access; or --model PATH of a local directory or .gguf file"


def fetch_config(repo_id: str, revision: str | None = None) -> Path:
    """Download config.json alone, or find it in the Hub's cache: the directory that it is in. Errors as of `fetch`."""
    directory = _download(repo_id, revision, ("config.json",), ways_out_of(repo_id))
    if not (directory / "config.json").is_file():
        raise InputError(
            f"{repo_id} holds no config.json", hint="of a repository of GGUF files, download one: --model FILE.gguf"
        )
    return directory


def stored_dtype(repo_id: str, commit: str) -> DType | None:
    """Return the type of floats that most bytes of a repository's safetensors have, as the Hub counts them.

    One request, and no tensor is downloaded. None where the Hub says nothing that is understood, or is not reached.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        found = api.model_info(repo_id, revision=commit, expand=["safetensors"], timeout=_TIMEOUT_SECONDS).safetensors
        counts = {} if found is None else {name: int(count) for name, count in found.parameters.items()}
    except Exception:  # of several HTTP libraries, and of an answer in another form
        return None
    known = ((DTYPES[name], count) for name, count in counts.items() if name in DTYPES)
    return usual_dtype({dtype: numpy_dtype(dtype).itemsize * count for dtype, count in known})


def fetch(
    repo_id: str, revision: str | None = None, *, cache_dir: str | Path | None = None, ways_out: str = WAYS_OUT
) -> tuple[Path, str]:
    """Download the files that a build needs (or find them in the Hub's cache): (directory, resolved commit).

    `revision` is a branch, tag or commit; None means the default branch. The environment variables of huggingface_hub
    hold (HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE). Raises `InputError` for a repository or revision that does
    not exist or may not be read, `UnsupportedEnvironment` where the Hub cannot be reached.
    """
    directory = _download(repo_id, revision, FILES, ways_out, cache_dir)
    if not any(directory.glob("*.safetensors")):
        raise InputError(
            f"{repo_id} holds no safetensors weights, or they cannot be fetched now (pickled ones never are)",
            hint=ways_out,
        )
    return directory, directory.name


def _download(
    repo_id: str,
    revision: str | None,
    files: tuple[str, ...],
    ways_out: str,
    cache_dir: str | Path | None = None,
) -> Path:
    if not is_repository(repo_id):
        raise InputError(f"{repo_id!r} is not a Hub repository, expected ORGANISATION/NAME")
    if revision is not None and not re.fullmatch(r"[A-Za-z0-9][\w./-]*", revision, re.ASCII):
        raise InputError(f"--revision {revision!r}: expected a branch, tag or commit")
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=list(files),
            cache_dir=cache_dir,
            endpoint=os.environ.get("HF_ENDPOINT"),
            etag_timeout=_TIMEOUT_SECONDS,
        )
    except Exception as error:
        raise _explained(error, repo_id, revision, ways_out) from error
    return Path(path)


def _explained(error: Exception, repo_id: str, revision: str | None, ways_out: str) -> KvcError:
    """Turn the library's exception into a one-line error; it wraps network errors of several HTTP libraries."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return InputError(
            f"{repo_id} is gated: accept its licence on the Hub, then log in with `hf auth login`", hint=ways_out
        )
    if isinstance(error, RevisionNotFoundError):
        return InputError(f"{repo_id} has no revision {revision!r}", hint=ways_out)
    if isinstance(error, RepositoryNotFoundError):
        return InputError(f"{repo_id} does not exist on the Hub, or needs a login (`hf auth login`)", hint=ways_out)
    if isinstance(error, OSError) and not isinstance(error, ConnectionError) and error.errno is not None:
        return UnsupportedEnvironment(f"{repo_id} cannot be stored in the Hub's cache: {error.strerror}", hint=ways_out)
    return UnsupportedEnvironment(
        f"{repo_id} is not in the Hub's cache, and the Hub cannot be reached ({type(error).__name__})", hint=ways_out
    )
