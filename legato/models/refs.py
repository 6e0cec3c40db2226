"""Names of models and of their files: pure text, no I/O.

A reference is `hf:owner/repo`, with an optional `:quant` (`Q4_K_M`) or `:file` (`sub/model.gguf`) at its end.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from legato.core.errors import RequestError

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REF = re.compile(rf"(?:hf:)?(?P<owner>{_PART})/(?P<repo>{_PART})(?::(?P<select>.+))?")
_QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|F16|FP16|F32|FP32|MXFP4(?:_MOE)?|NVFP4))$",
    re.IGNORECASE,
)
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
_NOT_MODELS = ("mmproj", "imatrix")  # a vision projector, the calibration data of a quantiser
_MAX_PARTS = 1000

Progress = Callable[[str, int, int], None]  # (file name, bytes that are here, bytes in all), on every piece
PARTIAL = ".partial"  # in a repository's folder: downloads that are not finished

FORM = "hf:owner/repo, hf:owner/repo:Q4_K_M or hf:owner/repo:file.gguf"


@dataclass(frozen=True, slots=True)
class HubRef:
    """A repository on the hub, and which of its models: a quantization or a file name; None = the usual choice."""

    owner: str
    repo: str
    select: str | None = None

    @property
    def repo_id(self) -> str:
        return f"{self.owner}/{self.repo}"

    def __str__(self) -> str:
        return f"hf:{self.repo_id}" + (f":{self.select}" if self.select else "")


def parse_ref(text: str) -> HubRef:
    """Raises RequestError for text that is no reference. The `hf:` may be left out."""
    match = _REF.fullmatch(text)
    select = match["select"] if match else None
    unsafe = bool(select) and (".." in PurePosixPath(str(select)).parts or str(select).startswith("/"))
    if match is None or unsafe or "\\" in text or "\0" in text:
        raise RequestError(f"{text!r} is not a model reference; write {FORM}", field="model")
    ref = HubRef(match["owner"], match["repo"], select)
    if "--" in ref.repo_id or ".." in ref.repo_id:  # the hub has no such names
        raise RequestError(f"{text!r} is not a model reference; write {FORM}", field="model")
    return ref


def is_model_file(name: str) -> bool:
    """Whether a file of a repository is (a part of) a language model: a GGUF, and not one of its accessories."""
    base = PurePosixPath(name).name.lower()
    return base.endswith(".gguf") and not any(word in base for word in _NOT_MODELS)


def model_stem(name: str) -> str:
    """The path without `.gguf` and without the number of a split: the same for all parts of a model."""
    if match := _SPLIT.fullmatch(name):
        return match["stem"]
    return name[: -len(".gguf")] if name.lower().endswith(".gguf") else name


def quant_label(name: str) -> str | None:
    """The quantization that a file name ends in, in capitals (`Q4_K_M`); None when it does not say."""
    match = _QUANT.search(PurePosixPath(model_stem(name)).name)
    return match[1].upper() if match else None


def part_number(name: str) -> tuple[int, int]:
    """(number from 1, count) of a split file; (1, 1) of a whole one."""
    match = _SPLIT.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]) <= _MAX_PARTS:
        return 1, 1
    return int(match["number"]), int(match["count"])


def split_paths(path: Path) -> tuple[Path, ...]:
    """The files of the model that `path` is (a part of), in order, whether they exist or not."""
    _, count = part_number(path.name)
    if count == 1:
        return (path,)
    stem = model_stem(path.name)
    return tuple(path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))


def group_models(names: Sequence[str]) -> dict[str, list[str]]:
    """Model files by `model_stem`, parts in order."""
    groups: dict[str, list[str]] = {}
    for name in sorted(filter(is_model_file, names)):
        groups.setdefault(model_stem(name), []).append(name)
    return groups


def short_labels(stems: Sequence[str]) -> dict[str, str]:
    """stem → what comes after the colon in a model's name: its quantization where that is unique, else the stem."""
    labels = [quant_label(stem) for stem in stems]
    return {
        stem: label if label is not None and labels.count(label) == 1 else stem
        for stem, label in zip(stems, labels, strict=True)
    }


def matches_selector(stem: str, select: str) -> bool:
    """Whether `select` (a quantization, a file, a file's stem; any case) means the model `stem`."""
    wanted = model_stem(select).lower()
    return wanted in (stem.lower(), PurePosixPath(stem).name.lower(), (quant_label(stem) or "").lower())
