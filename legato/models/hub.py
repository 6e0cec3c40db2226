"""Fetch model files from the Hugging Face hub.

One request lists the repository at one commit, with sizes and checksums; then each file comes in one stream.
huggingface_hub makes the requests (endpoint, token, proxies, its errors); the bytes are written here, because its own
download throws away what an interrupted run had got. A file is written beside its place under a name that holds its
checksum, and moved there only when its size, its checksum and its GGUF header are right.

Imported only when something is to be downloaded: huggingface_hub takes 0.3 s to import.
"""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # its __all__ is computed
    WeakFileLock,
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
)

from legato.core.errors import DownloadError, LegatoError, ModelFileError, RequestError, UnknownModelError
from legato.models.gguf import read_header
from legato.models.memory import format_bytes
from legato.models.refs import (
    FORM,
    PARTIAL,
    HubRef,
    Progress,
    group_models,
    matches_selector,
    model_stem,
    part_number,
    quant_label,
    short_labels,
)

PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0")  # when the reference names none: small and good, then fast, then exact
_ATTEMPTS = 5  # without a single new byte
_PIECE_BYTES = 256 << 10
_TIMEOUT_S = 30.0
# httpx's or requests' base error, by the version of huggingface_hub; it does not name it in public.
_NETWORK_ERRORS: tuple[type[BaseException], ...] = (*HfHubHTTPError.__bases__, OSError)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the repository at the listed commit. `sha256` is None for a file outside LFS."""

    name: str
    url: str
    size: int
    sha256: str | None
    blob: str


def download(ref: HubRef, folder: Path, progress: Progress | None = None) -> tuple[Path, ...]:
    """The model's files, in order, under `folder`. What is there already and right is not fetched again.

    Raises UnknownModelError, DownloadError, ModelFileError, RequestError.
    """
    with _mapped_errors(ref):
        files = _list_files(ref)
        wanted = [files[name] for name in choose(ref, list(files))]
        # Kept for good, and away from what is cleaned up: a lock file that is deleted locks nobody out.
        lock = folder.parent.parent / ".locks" / f"{ref.owner}--{ref.repo}"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            try:
                _bring(wanted, folder, progress)
            finally:
                _drop_empty(folder / PARTIAL, folder, folder.parent)
        return tuple(folder / file.name for file in wanted)


def _bring(wanted: Sequence[RemoteFile], folder: Path, progress: Progress | None) -> None:
    partial = folder / PARTIAL
    partial.mkdir(parents=True, exist_ok=True)
    missing = [file for file in wanted if not _is_complete(folder / file.name, file)]
    _check_disk(missing, partial)
    for file in missing:
        _fetch(file, _partial_path(partial, file), progress)
    # The first part goes last: a model counts as installed by its first file.
    for file in reversed(missing):
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        _partial_path(partial, file).replace(target)


def _drop_empty(*folders: Path) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return  # not empty, or not there


def choose(ref: HubRef, names: Sequence[str]) -> list[str]:
    """Which files of a repository make the model that `ref` means, parts in order.

    Raises UnknownModelError, with what the repository has, when none or more than one fits.
    """
    groups = group_models(names)
    has = ", ".join(short_labels(list(groups)).values())
    if not groups:
        raise UnknownModelError(
            f"{ref.repo_id} has no GGUF files; look for a repository with GGUF in its name", field="model"
        )
    fitting = list(groups) if ref.select is None else [s for s in groups if matches_selector(s, ref.select)]
    if ref.select is not None and len(fitting) > 1:  # the full path decides between files of one name
        fitting = [s for s in fitting if s.lower() == model_stem(ref.select).lower()] or fitting
    if ref.select is None and len(fitting) > 1:
        by_quant = ([s for s in fitting if quant_label(s) == quant] for quant in PREFERRED)
        fitting = next((stems for stems in by_quant if stems), fitting)
    if len(fitting) != 1:
        problem = "has no" if not fitting else "has several models, and it is not clear which is"
        what = f"{ref.select!r}" if ref.select else "meant"
        raise UnknownModelError(
            f"{ref.repo_id} {problem} {what}; it has: {has}; name one: legato models pull hf:{ref.repo_id}:NAME",
            field="model",
        )
    parts = groups[fitting[0]]
    if [part_number(part)[0] for part in parts] != list(range(1, part_number(parts[0])[1] + 1)):
        raise UnknownModelError(
            f"{ref.repo_id} lacks parts of {fitting[0]}: it has {', '.join(parts)}; take another one of: {has}",
            field="model",
        )
    return parts


def _list_files(ref: HubRef) -> dict[str, RemoteFile]:
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    if constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise OfflineModeIsEnabled
    try:
        info = HfApi(endpoint=endpoint).model_info(ref.repo_id, files_metadata=True, timeout=_TIMEOUT_S)
    except (ValueError, KeyError, TypeError) as exc:  # not JSON, or not what a hub sends
        if isinstance(exc, HFValidationError | HfHubHTTPError):
            raise
        raise DownloadError(f"{ref}: the hub's answer makes no sense ({exc}); check HF_ENDPOINT") from exc
    files: dict[str, RemoteFile] = {}
    for sibling in info.siblings or []:
        name = sibling.rfilename
        path = PurePosixPath(name)
        if path.is_absolute() or {"..", PARTIAL} & set(path.parts) or "\\" in name or not name.isprintable():
            continue  # a name that would leave the folder or write to the terminal; no honest repository has one
        size = sibling.lfs.size if sibling.lfs else sibling.size
        if size is not None:
            files[name] = RemoteFile(
                name=name,
                url=hf_hub_url(ref.repo_id, name, revision=info.sha, endpoint=endpoint),
                size=size,
                sha256=sibling.lfs.sha256 if sibling.lfs else None,
                blob=(sibling.lfs.sha256 if sibling.lfs else sibling.blob_id) or str(info.sha),
            )
    return files


def _partial_path(partial: Path, file: RemoteFile) -> Path:
    return partial / f"{file.blob[:16]}-{PurePosixPath(file.name).name}"


def _is_complete(path: Path, file: RemoteFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    return file.sha256 is None or _sha256(path) == file.sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _check_disk(files: Sequence[RemoteFile], partial: Path) -> None:
    have = [path.stat().st_size for file in files if (path := _partial_path(partial, file)).exists()]
    needed = sum(file.size for file in files) - sum(have)
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise DownloadError(
            f"{format_bytes(needed)} are to be downloaded, but {partial.parent} has room for {format_bytes(free)}; "
            "free some space, or set LEGATO_HOME to a folder on another disk"
        )


def _fetch(file: RemoteFile, path: Path, progress: Progress | None) -> None:
    """Bring `path` to the full file and check it. A file that is wrong is deleted, an unfinished one is kept."""
    failures = 0
    while (here := path.stat().st_size if path.exists() else 0) != file.size or not path.exists():
        if here > file.size:
            path.unlink()
            continue
        try:
            _stream(file, path, here, progress)
        except _NETWORK_ERRORS as exc:
            if not _is_transient(exc):
                raise
            failures = 0 if path.exists() and path.stat().st_size > here else failures + 1
            if failures >= _ATTEMPTS:
                raise
            time.sleep(min(0.25 * 2**failures, 4))
            continue
        if (got := path.stat().st_size) != file.size:
            path.unlink()
            raise DownloadError(
                f"{file.name}: the hub sent {got} bytes instead of {file.size}; the file was dropped, pull again"
            )
    if file.sha256 is not None and _sha256(path) != file.sha256:
        path.unlink()
        raise DownloadError(
            f"{file.name}: its checksum is wrong, so it was damaged on the way; it was dropped, pull again"
        )
    try:
        read_header(path)
    except ModelFileError as exc:
        path.unlink()
        raise ModelFileError(f"{file.name}: the hub's file is no usable GGUF and was dropped ({exc})") from exc


def _stream(file: RemoteFile, path: Path, here: int, progress: Progress | None) -> None:
    """Append to `path` what is missing from byte `here` on."""
    headers = build_hf_headers()
    headers["Accept-Encoding"] = "identity"  # a compressed body would make the sizes and ranges mean nothing
    if here:
        headers["Range"] = f"bytes={here}-"
    request = http_stream_backoff(
        "GET",
        file.url,
        headers=headers,
        timeout=_TIMEOUT_S,
        retry_on_exceptions=(),  # a stream that has begun cannot be retried there; `_fetch` does it
        retry_on_status_codes=(408, 429),
    )
    with request as response:
        hf_raise_for_status(response)
        resumed = response.status_code == 206
        with path.open("ab" if resumed else "wb") as out:
            for piece in response.iter_bytes(_PIECE_BYTES):
                out.write(piece)
                if out.tell() > file.size:
                    break  # the caller says so; an endless answer must not fill the disk
                if progress is not None:
                    progress(file.name, out.tell(), file.size)


def _is_transient(exc: BaseException) -> bool:
    if isinstance(exc, HfHubHTTPError):
        return exc.response.status_code >= 500
    return not isinstance(exc, OSError) or isinstance(exc, ConnectionError | TimeoutError)


@contextmanager
def _mapped_errors(ref: HubRef) -> Iterator[None]:
    """Every failure of the hub's client, as one of Legato's errors."""
    try:
        yield
    except LegatoError:
        raise
    except OfflineModeIsEnabled as exc:
        raise DownloadError(
            f"{ref} cannot be fetched: offline mode is on; unset HF_HUB_OFFLINE, or use a model that is here "
            "(`legato models list`)"
        ) from exc
    except GatedRepoError as exc:
        raise DownloadError(
            f"{ref.repo_id} asks for its terms to be accepted first; do so on its page on the hub, then set HF_TOKEN "
            "to your token and pull again"
        ) from exc
    except (RepositoryNotFoundError, RevisionNotFoundError) as exc:
        raise UnknownModelError(
            f"the hub has no model {ref.repo_id}, or it is private; check the name, or set HF_TOKEN", field="model"
        ) from exc
    except EntryNotFoundError as exc:
        raise UnknownModelError(f"{ref}: the file is gone from the repository; pull again", "model") from exc
    except HFValidationError as exc:
        raise RequestError(f"{ref} is not a model reference; write {FORM}", field="model") from exc
    except _NETWORK_ERRORS as exc:
        raise _network_error(ref, exc) from exc


def _network_error(ref: HubRef, exc: BaseException) -> DownloadError:
    if isinstance(exc, HfHubHTTPError):
        status = exc.response.status_code
        return DownloadError(f"{ref}: the hub answered with status {status}; try again later, or check HF_TOKEN")
    if isinstance(exc, OSError) and exc.errno == errno.ENOSPC:
        return DownloadError(f"{ref}: the disk is full; free some space and pull again, it goes on from here")
    if isinstance(exc, OSError) and exc.filename is not None:
        return DownloadError(f"{ref}: {exc}; check the folder's permissions, or set LEGATO_HOME to another one")
    said = str(exc) or type(exc).__name__
    return DownloadError(
        f"{ref}: the hub cannot be reached ({said}); check the network and HF_ENDPOINT, then pull again: "
        "what has arrived is kept"
    )
