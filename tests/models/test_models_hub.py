import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from legato.core.errors import DownloadError, LegatoError, ModelFileError, RequestError, UnknownModelError
from legato.models import hub as hub_module
from legato.models.refs import PARTIAL, Progress, parse_ref
from legato.models.registry import installed, installed_models, models_home, pull, remove, resolve
from tests.models.loopback_hub import LoopbackHub, running_hub
from tests.models.model_files import write_model, write_split_model

REPO = "tiny-lab/Tiny-GGUF"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEGATO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        yield running


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """About 100 kB."""
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", rows=256).read_bytes()


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """About 3 MB: several pieces of a download."""
    return write_model(tmp_path_factory.mktemp("large") / "large.gguf", rows=8000).read_bytes()


def here() -> list[str]:
    return [model.name for model in installed_models() if model.name != "smollm2"]


def leftovers(home: Path) -> list[Path]:
    """Every file under the home but the locks, which stay."""
    return [path for path in home.rglob("*") if path.is_file() and path.parent.name != ".locks"]


def test_pull_by_quantization_in_any_case(hub: LoopbackHub, tiny: bytes, home: Path) -> None:
    hub.files[REPO] = {"README.md": b"# Tiny", "tiny-Q4_K_M.gguf": tiny, "tiny-Q8_0.gguf": tiny}
    model = pull(f"hf:{REPO}:q8_0")
    assert model.name == f"{REPO}:Q8_0"
    assert model.path == home / "models" / REPO / "tiny-Q8_0.gguf"
    assert model.path.read_bytes() == tiny
    assert leftovers(home) == [model.path]
    assert hub.bytes_sent() == len(tiny)
    assert resolve(f"hf:{REPO}:Q8_0") == resolve("tiny-gguf:Q8_0") == resolve("Tiny-GGUF") == model


@pytest.mark.parametrize("select", ["sub/tiny-Q8_0.gguf", "tiny-Q8_0.gguf", "tiny-Q8_0"])
def test_pull_by_file(hub: LoopbackHub, tiny: bytes, home: Path, select: str) -> None:
    hub.files[REPO] = {"tiny-Q4_0.gguf": tiny, "sub/tiny-Q8_0.gguf": tiny}
    assert pull(f"{REPO}:{select}").path == home / "models" / REPO / "sub/tiny-Q8_0.gguf"


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["t-Q8_0.gguf", "t-Q4_K_M.gguf", "t-Q4_0.gguf"], "t-Q4_K_M.gguf"),
        (["t-Q8_0.gguf", "t-Q2_K.gguf", "t-Q4_0.gguf"], "t-Q4_0.gguf"),
        (["t-F16.gguf", "t-Q8_0.gguf"], "t-Q8_0.gguf"),
        (["mmproj-t-F16.gguf", "t.imatrix.gguf", "whatever.gguf"], "whatever.gguf"),
    ],
)
def test_the_usual_choice(names: list[str], chosen: str) -> None:
    assert hub_module.choose(parse_ref(REPO), names) == [chosen]


@pytest.mark.parametrize(
    ("select", "names", "said"),
    [
        (None, ["t-Q2_K.gguf", "t-Q3_K_S.gguf"], "it has: Q2_K, Q3_K_S"),
        ("Q5_0", ["t-Q2_K.gguf", "t-Q3_K_S.gguf"], "has no 'Q5_0'; it has: Q2_K, Q3_K_S"),
        ("Q2_K", ["a-Q2_K.gguf", "b-Q2_K.gguf"], "not clear which is 'Q2_K'; it has: a-Q2_K, b-Q2_K"),
        (None, ["model.safetensors"], "no GGUF files"),
        ("Q2_K", ["a-Q2_K-00002-of-00002.gguf"], "lacks parts"),
    ],
)
def test_no_clear_choice_lists_what_there_is(select: str | None, names: list[str], said: str) -> None:
    ref = parse_ref(REPO if select is None else f"{REPO}:{select}")
    with pytest.raises(UnknownModelError, match=said):
        hub_module.choose(ref, names)


def test_a_split_model_comes_with_all_its_parts(hub: LoopbackHub, home: Path, tmp_path: Path) -> None:
    parts = write_split_model(tmp_path, "tiny-Q4_0")
    hub.files[REPO] = {f"Q4_0/{part.name}": part.read_bytes() for part in parts}
    model = pull(f"hf:{REPO}:Q4_0")
    assert [path.name for path in model.paths] == [part.name for part in parts]
    assert [path.read_bytes() for path in model.paths] == [part.read_bytes() for part in parts]
    (entry,) = [entry for entry in installed() if entry.model == model]
    assert entry.problem is None and len(entry.headers) == 3
    assert here() == [f"{REPO}:Q4_0"]


def test_a_broken_connection_is_taken_up_again(hub: LoopbackHub, large: bytes) -> None:
    hub.files[REPO] = {"t-Q8_0.gguf": large}
    hub.cut_after = [1_000_000, 0, 700_000]
    model = pull(f"hf:{REPO}")
    assert model.path.read_bytes() == large
    assert len(hub.downloads()) == 4
    assert all(request.range for request in hub.downloads()[1:])
    assert hub.bytes_sent() < len(large) + 3 * (256 << 10)  # no piece twice but the ones that were cut


class Leave(KeyboardInterrupt):
    """Ctrl-C in the middle of a download."""


def interrupt_after(count: int) -> Progress:
    def progress(name: str, done: int, total: int) -> None:
        if done >= count:
            raise Leave

    return progress


def test_an_interrupted_pull_goes_on_where_it_ended(hub: LoopbackHub, large: bytes, home: Path) -> None:
    hub.files[REPO] = {"t-Q8_0.gguf": large}
    with pytest.raises(Leave):
        pull(f"hf:{REPO}", interrupt_after(1_500_000))
    assert here() == []
    (partial,) = (home / "models" / REPO / PARTIAL).glob("*.gguf")
    kept = partial.stat().st_size
    assert 1_500_000 <= kept < len(large) and partial.read_bytes() == large[:kept]
    told: list[int] = []
    model = pull(f"hf:{REPO}", lambda name, done, total: told.append(done))
    assert hub.downloads()[1].range == f"bytes={kept}-"
    assert hub.downloads()[1].sent == [len(large) - kept]
    assert told[0] > kept and told[-1] == len(large)
    assert model.path.read_bytes() == large
    assert leftovers(home) == [model.path]


def test_a_hub_that_ignores_ranges_still_gives_the_right_file(hub: LoopbackHub, large: bytes) -> None:
    hub.files[REPO] = {"t-Q8_0.gguf": large}
    hub.ignore_ranges = True
    hub.cut_after = [1_000_000]
    assert pull(f"hf:{REPO}").path.read_bytes() == large


def test_a_new_version_upstream_is_not_mixed_with_an_old_partial(
    hub: LoopbackHub, large: bytes, tmp_path: Path
) -> None:
    hub.files[REPO] = {"t-Q8_0.gguf": large}
    with pytest.raises(Leave):
        pull(f"hf:{REPO}", interrupt_after(1_500_000))
    newer = write_model(tmp_path / "newer.gguf", rows=8000, seed=1).read_bytes()
    assert len(newer) == len(large)
    hub.files[REPO] = {"t-Q8_0.gguf": newer}
    assert pull(f"hf:{REPO}").path.read_bytes() == newer
    assert hub.downloads()[1].range is None


def test_what_is_here_is_not_fetched_again_but_what_changed_is(hub: LoopbackHub, tiny: bytes, large: bytes) -> None:
    hub.files[REPO] = {"t-Q8_0.gguf": tiny}
    first = pull(f"hf:{REPO}")
    assert pull(f"hf:{REPO}") == first and len(hub.downloads()) == 1
    hub.files[REPO] = {"t-Q8_0.gguf": large}
    assert pull(f"hf:{REPO}").path.read_bytes() == large
    assert here() == [f"{REPO}:Q8_0"]


def test_resolve_downloads_only_when_asked_to(hub: LoopbackHub, tiny: bytes) -> None:
    hub.files[REPO] = {"t-Q8_0.gguf": tiny}
    with pytest.raises(UnknownModelError, match=f"legato models pull hf:{REPO}"):
        resolve(f"hf:{REPO}")
    assert hub.seen == []
    assert resolve(f"hf:{REPO}", download=True).path.read_bytes() == tiny


def wrong(hub: LoopbackHub, content: bytes, size: int | None = None, sha256: str | None = None) -> None:
    """The hub lists another size or checksum than its file has."""
    hub.files[REPO] = {"t-Q8_0.gguf": content}
    true = hashlib.sha256(content).hexdigest()
    hub.claim = {"t-Q8_0.gguf": (len(content) if size is None else size, sha256 or true)}


def test_wrong_files_are_refused_and_leave_nothing(hub: LoopbackHub, tiny: bytes, home: Path) -> None:
    damaged = tiny[:-40] + bytes(40)
    cases: list[tuple[bytes, int | None, str | None, type[LegatoError], str]] = [
        (tiny, len(tiny) + 8, None, DownloadError, f"sent {len(tiny)} bytes instead of {len(tiny) + 8}"),
        (tiny, len(tiny) - 8, None, DownloadError, "bytes instead of"),
        (damaged, None, hashlib.sha256(tiny).hexdigest(), DownloadError, "checksum"),
        (b"<html>sign in</html>" * 50, None, None, ModelFileError, "web page"),
        (tiny[: len(tiny) // 2], None, None, ModelFileError, "truncated"),
    ]
    for content, size, sha256, error, said in cases:
        wrong(hub, content, size, sha256)
        with pytest.raises(error, match=said):
            pull(f"hf:{REPO}")
        assert here() == []
        assert leftovers(home) == []
    wrong(hub, tiny)
    assert pull(f"hf:{REPO}").path.read_bytes() == tiny


def test_a_bad_part_keeps_a_split_model_from_being_installed(hub: LoopbackHub, tmp_path: Path, home: Path) -> None:
    parts = write_split_model(tmp_path, "tiny-Q4_0")
    hub.files[REPO] = {part.name: part.read_bytes() for part in parts}
    hub.files[REPO][parts[2].name] = b"<html>" * 100
    with pytest.raises(ModelFileError, match=parts[2].name):
        pull(f"hf:{REPO}")
    assert here() == []
    hub.files[REPO][parts[2].name] = parts[2].read_bytes()
    before = len(hub.downloads())
    assert len(pull(f"hf:{REPO}").paths) == 3
    assert len(hub.downloads()) == before + 1  # the good parts were kept


def test_errors_of_the_hub_say_what_to_do(hub: LoopbackHub, tiny: bytes) -> None:
    with pytest.raises(UnknownModelError, match=r"no model nobody/nothing.*HF_TOKEN"):
        pull("hf:nobody/nothing")
    hub.gated.add(REPO)
    with pytest.raises(DownloadError, match="terms to be accepted"):
        pull(f"hf:{REPO}")
    hub.api_status = 500
    with pytest.raises(DownloadError, match="status 500; try again"):
        pull(f"hf:{REPO}")
    hub.api_status, hub.api_body = 200, b"<html>captive portal</html>"
    with pytest.raises(DownloadError, match="check HF_ENDPOINT"):
        pull(f"hf:{REPO}")
    hub.api_body = b'{"siblings": 3}'
    with pytest.raises(DownloadError, match="check HF_ENDPOINT"):
        pull(f"hf:{REPO}")


def test_no_hub_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:  # bound and not listening: connections to it are refused
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(DownloadError, match="cannot be reached"):
            pull(f"hf:{REPO}")


def test_offline_mode(hub: LoopbackHub, tiny: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files[REPO] = {"t-Q8_0.gguf": tiny}
    pulled = pull(f"hf:{REPO}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(hub.seen)
    assert resolve(f"hf:{REPO}", download=True) == pulled
    with pytest.raises(DownloadError, match="unset HF_HUB_OFFLINE"):
        pull(f"hf:{REPO}")
    assert len(hub.seen) == asked


@pytest.mark.parametrize(
    "ref", ["", "hf:", "hf:one", "hf:a/b/c", "a/b:../../x.gguf", "a/b:/etc/x", "a/..:x", "a b/c", "a/b:"]
)
def test_bad_references(ref: str) -> None:
    with pytest.raises(RequestError, match="hf:owner/repo:Q4_K_M"):
        pull(ref)


def test_file_names_cannot_leave_the_folder(hub: LoopbackHub, tiny: bytes, home: Path) -> None:
    hub.files[REPO] = {"../../../evil-Q4_K_M.gguf": tiny, "/abs-Q4_K_M.gguf": tiny, "ok-Q2_K.gguf": tiny}
    assert pull(f"hf:{REPO}").path == home / "models" / REPO / "ok-Q2_K.gguf"


def test_the_token_goes_to_the_hub_only(hub: LoopbackHub, tiny: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_sesame")
    hub.files[REPO] = {"t-Q8_0.gguf": tiny}
    pull(f"hf:{REPO}")
    api, resolved, content = hub.seen
    assert api.token == resolved.token == "Bearer hf_sesame"
    assert content.path.startswith("/cdn/") and content.token is None


def test_a_full_disk_is_said_before_anything_is_fetched(hub: LoopbackHub, tiny: bytes) -> None:
    wrong(hub, tiny, size=1 << 60)
    with pytest.raises(DownloadError, match=r"1,048,576 TiB are to be downloaded.*LEGATO_HOME"):
        pull(f"hf:{REPO}")
    assert hub.downloads() == []


def test_remove_deletes_the_model_and_only_it(hub: LoopbackHub, tiny: bytes, home: Path) -> None:
    hub.files[REPO] = {"t-Q8_0.gguf": tiny, "t-Q4_0.gguf": tiny}
    keep, drop = pull(f"hf:{REPO}:Q4_0"), pull(f"hf:{REPO}:Q8_0")
    (home / "notes.txt").write_text("mine")
    remove("Tiny-GGUF:Q8_0")
    assert keep.path.exists() and not drop.path.exists()
    remove(f"{REPO}:Q4_0")
    assert leftovers(home) == [home / "notes.txt"]
    assert [path.name for path in (home / "models").iterdir()] == [".locks"]


SCRIPT = """
import sys
from legato.core.errors import LegatoError
from legato.models.registry import pull
try:
    print(pull(sys.argv[1]).name)
except LegatoError as exc:
    sys.exit(f"error: {exc}")
"""


def test_the_environment_is_honoured_by_a_fresh_process(
    hub: LoopbackHub, tiny: bytes, home: Path, tmp_path: Path
) -> None:
    hub.files[REPO] = {"t-Q8_0.gguf": tiny}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_from_home")
    environment = dict(os.environ) | {"HF_HUB_DISABLE_TELEMETRY": "1"}
    run = [sys.executable, "-W", "error", "-c", SCRIPT, f"hf:{REPO}"]
    done = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{REPO}:Q8_0\n", "")
    assert hub.seen[0].token == "Bearer hf_from_home"
    done = subprocess.run(run, env=environment | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 1 and "offline mode is on" in done.stderr
    assert models_home() == home


def test_two_pulls_at_once_fetch_the_file_once(hub: LoopbackHub, large: bytes, home: Path) -> None:
    hub.files[REPO] = {"t-Q8_0.gguf": large}
    hub.hold_first_download_s = 1.0  # so that a second one, were there no lock, would begin beside it
    run = [sys.executable, "-c", SCRIPT, f"hf:{REPO}"]
    both = [
        subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)) for _ in range(2)
    ]
    for process in both:
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, b"")
    assert (home / "models" / REPO / "t-Q8_0.gguf").read_bytes() == large
    assert [request.path for request in hub.seen].count(f"/api/models/{REPO}") == 2
    assert len(hub.downloads()) == 1
