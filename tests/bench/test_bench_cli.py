"""`legato bench` as a whole: in process on the embedded model, and against a server on the loopback."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from legato.cli.main import main
from tests.bench.openai_server import Call, OpenAIServer, answer, serving

PATIENCE_S = 120
TINY = ["--rounds", "1", "--pause", "0", "--seed", "7"]
# One thread: two that wait for each other on a crowded machine take a hundred times as long.
LOCAL = [*TINY, "--context", "256", "--slots", "2", "--threads", "1"]
PNG = b"\x89PNG\r\n\x1a\n"


def measure(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    """Run with --json -, → what it wrote. Everything must have gone well."""
    status = main(["bench", *args, "--json", "-"])
    out, err = capsys.readouterr()
    assert status == 0, err
    value: dict[str, Any] = json.loads(out)
    assert value["benchmark"] == args[0]
    assert {"legato", "machine", "settings", "definitions", "units", "targets"} <= value.keys()
    for target in value["targets"]:
        assert set(target["metrics"]) == set(value["units"])
        for metric in target["metrics"].values():
            assert metric["count"] == len(metric["values"])
            if metric["count"]:
                assert metric["min"] <= metric["p50"] <= metric["p95"] <= metric["p99"] <= metric["max"]
                assert all(number >= 0 for number in metric["values"])
    return value


def counts(value: dict[str, Any], target: int = 0) -> dict[str, int]:
    return {key: metric["count"] for key, metric in value["targets"][target]["metrics"].items()}


def test_stall_in_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "stall.png"
    value = measure(capsys, "stall", *LOCAL, "--tokens", "64", "--answer", "200", "--plot", str(picture))
    found = counts(value)
    assert found["newcomer_ttft"] == found["alone_ttft"] == found["stall"] == found["slowdown"] == 1
    assert found["gap"] > 0 and found["gap_before"] >= 0
    metrics = value["targets"][0]["metrics"]
    assert metrics["stall"]["max"] == metrics["gap"]["max"]
    assert 64 < metrics["prompt_tokens"]["max"] < 128
    assert value["settings"]["seed"] == 7 and value["settings"]["engine"] == {"context": 256, "slots": 2, "threads": 1}
    assert picture.read_bytes().startswith(PNG)


def test_prefix_in_process(capsys: pytest.CaptureFixture[str]) -> None:
    value = measure(capsys, "prefix", *LOCAL, "--tokens", "64", "--requests", "2", "--answer", "2")
    assert counts(value)["cold_ttft"] == counts(value)["warm_ttft"] == 2
    metrics = value["targets"][0]["metrics"]
    assert metrics["cold_worst"]["max"] == metrics["cold_ttft"]["max"]
    assert metrics["warm_cached"]["max"] >= 64  # the path that is measured: the prefix was there


@pytest.mark.parametrize("loop", [("--clients", "2"), ("--rate", "50")])
def test_load_in_process(loop: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    value = measure(capsys, "load", *LOCAL, *loop, "--requests", "3", "--tokens", "4", "--answer", "3")
    found = counts(value)
    assert (found["ttft"], found["tokens_per_s"], found["goodput"]) == (3, 1, 1)
    assert value["targets"][0]["metrics"]["failed"]["values"] == [0]


def test_cancel_in_process(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--tokens", "150", "--answer", "60", "--after", "0.001")
    value = measure(capsys, "cancel", *LOCAL, *sizes)
    assert counts(value)["decode"] == 1
    assert counts(value)["prefill"] == 1 or "had read the prompt" in value["targets"][0]["notes"][0]


def test_a_prompt_that_was_read_before_the_client_left_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    value = measure(capsys, "cancel", *LOCAL, "--phase", "prefill", "--tokens", "4", "--after", "60", "--answer", "2")
    assert counts(value) == {"prefill": 0, "decode": 0}
    assert "a shorter --after" in value["targets"][0]["notes"][0]


def test_cold(capsys: pytest.CaptureFixture[str]) -> None:
    value = measure(capsys, "cold", "--rounds", "1")
    assert counts(value) == {"first_byte": 1}


def test_cold_says_why_there_was_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cold", "--rounds", "1", "-m", "no-such-model"]) == 1
    assert "no-such-model" in capsys.readouterr().err


def test_context_in_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "context.png"
    args = ("--rounds", "1", "--contexts", "112,128", "--answer", "2", "--threads", "1", "--plot", str(picture))
    value = measure(capsys, "context", *args)
    assert [target["name"] for target in value["targets"]] == ["flash attention off", "flash attention on"]
    for place in (0, 1):
        found = counts(value, place)
        assert all(found[f"{key}@{size}"] == 1 for key in ("ttft_short", "ttft_full", "memory") for size in (112, 128))
        depths = [x for x, _ in value["targets"][place]["traces"]["gap"]]
        assert len(depths) == 6 and 64 < max(depths) <= 128  # 16, ¼ and full of each; ½ is more than full
    assert picture.read_bytes().startswith(PNG)


def test_two_targets_take_turns_and_get_ratios(
    server: OpenAIServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with serving() as second:
        picture, order = tmp_path / "load.png", [*TINY[2:], "--rounds", "2"]
        sizes = ("--requests", "3", "--clients", "2", "--tokens", "5", "--answer", "4")
        args = (*order, *sizes, "--url", server.url, "--vs", second.url, "--vs-model", "b", "--plot", str(picture))
        value = measure(capsys, "load", *args)
        assert [target["name"] for target in value["targets"]] == [server.url, second.url]
        assert value["targets"][0]["metrics"]["ttft"]["count"] == 6
        ours, theirs = (target["metrics"]["ttft"]["p50"] for target in value["targets"])
        assert value["ratios"]["ttft"] == pytest.approx(ours / theirs)
        prompts = [call.body["messages"][0]["content"] for one in (server, second) for call in one.calls]
        assert len(prompts) == len(set(prompts)) == 2 * (1 + 2 * 3)  # a warm-up and two rounds of three, no two alike
        assert {call.body["model"] for call in server.calls} == {"tiny"}
        assert {call.body["model"] for call in second.calls} == {"b"}
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", ["stall", "prefix"])
def test_in_process_beside_a_server(name: str, server: OpenAIServer, capsys: pytest.CaptureFixture[str]) -> None:
    """On stdout a table for people, with both names and the ratio."""
    sizes = {"stall": ("--answer", "200"), "prefix": ("--answer", "2", "--requests", "2")}[name]
    args = ["bench", name, *LOCAL, "--tokens", "16", *sizes, "--vs", server.url]
    status = main(args)
    out, err = capsys.readouterr()
    assert status == 0, err
    assert "legato in process (smollm2)" in out and server.url in out
    assert "ratio of p50" in out and " ×" in out and "TTFT: from" in out and "p99" in out
    assert "warming up" in err and "warming up" not in out


def test_cancel_at_a_server_by_its_process(server: OpenAIServer, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as idle:
        args = ("--url", server.url, "--pid", str(idle.pid), "--answer", "5000", "--phase", "decode")
        value = measure(capsys, "cancel", *TINY, *args)
        idle.communicate(b"\n")
    assert counts(value)["decode"] == 1


def test_failed_requests_are_counted_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    async def every_other(call: Call) -> None:
        if sum(server.calls.index(call) > n for n in range(99)) % 2 == 0:
            return await answer(call)
        await call.head("503 Service Unavailable", "application/json")
        await call.send(b'{"error": {"message": "full"}}')
        return None

    with serving(every_other) as server:
        sizes = ("--requests", "4", "--clients", "1", "--tokens", "5", "--answer", "4")
        value = measure(capsys, "load", *TINY, *sizes, "--url", server.url)
    metrics = value["targets"][0]["metrics"]
    assert metrics["failed"]["values"] == [2] and metrics["ttft"]["count"] == 2
    assert "2 of 4 requests failed" in value["targets"][0]["notes"][0] and "full" in value["targets"][0]["notes"][0]


@pytest.mark.parametrize("name", ["stall", "prefix", "load"])
def test_no_server_ends_with_1(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as gone:
        pass
    assert main(["bench", name, "--url", gone.url]) == 1
    out, err = capsys.readouterr()
    assert out == "" and f"error: no server answers at {gone.url}" in err and "start it" in err


async def silent(call: Call) -> None:
    await call.head()
    await asyncio.sleep(3600)


def test_a_silent_server_is_not_waited_for_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(silent) as server:
        assert main(["bench", "stall", "--url", server.url, "--timeout", "0.2"]) == 1
    assert "took more than 0.2 s for one round; --timeout" in capsys.readouterr().err


def test_a_running_stream_that_ends_too_early_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        assert main(["bench", "stall", *TINY, "--url", server.url, "--tokens", "5", "--answer", "3"]) == 1
    assert "ended, after 3 tokens, before the newcomer's first text; a larger --answer" in capsys.readouterr().err


def test_interrupt_ends_it_at_once() -> None:
    asked = threading.Event()

    async def hang(call: Call) -> None:
        asked.set()
        await silent(call)

    with serving(hang) as server:
        command = [sys.executable, "-m", "legato", "bench", "stall", "--url", server.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            assert asked.wait(PATIENCE_S)
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, out) == (130, b"") and b"Traceback" not in err


URL = ("--url", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["stall", "--url", "localhost:8080"], "write it like http://"),
        (["stall", "--vs", "http://"], "write it like http://"),
        (["stall", "--url", "http://a:b"], "write it like http://"),
        (["stall", *URL, "--vs", "http://127.0.0.1:1/"], "the same server"),
        (["stall", *URL, "--slots", "2"], "--slots is for the model in this process"),
        (["stall", "--rounds", "0"], "'--rounds': 0 is not in the range 1<=x<=1000"),
        (["stall", "--itl-target-ms", "nan"], "not a finite number"),
        (["stall", "--timeout", "-1"], "'--timeout': -1.0 is not in the range"),
        (["stall", "--context", "1"], "context must be"),
        (["stall", "--json", "/no/such/folder/x.json"], "cannot be written"),
        (["stall", "--plot", "/"], "cannot be written"),
        (["load", "--clients", "2", "--rate", "1"], "give one of them"),
        (["cancel", *URL], "give its process by --pid"),
        (["cancel", "--vs", "http://127.0.0.1:1"], "give its process by --vs-pid"),
        (["context", "--contexts", "many"], "1024,2048"),
        (["context", "--contexts", "8"], "from 64"),
        (["prefix", "--model", "no-such-model"], "no-such-model"),
        (["nothing"], "No such command"),
    ],
)
def test_wrong_use_ends_with_2_before_anything_is_measured(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["bench", *args])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "") and said in err


def test_a_process_that_is_not_there_is_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cancel", *URL, "--pid", str(2**22 + 1)]) == 1
    assert "cannot be looked at" in capsys.readouterr().err


@pytest.mark.parametrize(("missing", "args"), [("rich", []), ("httpx", [*URL]), ("matplotlib", ["--plot", "x.png"])])
def test_a_missing_package_is_named_with_what_installs_it(missing: str, args: list[str], tmp_path: Path) -> None:
    script = (
        f"import sys; sys.modules[{missing!r}] = None; from legato.cli.main import main; "
        f"sys.exit(main(['bench', 'prefix', *{args!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert f"this needs {missing}" in done.stderr and "pip install 'legato[bench]'" in done.stderr
    assert not list(tmp_path.iterdir())


def test_help_says_what_the_words_mean(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("stall", "prefix", "load", "cancel", "cold", "context"):
        assert main(["bench", name, "--help"]) == 0
        out = capsys.readouterr().out
        assert f"legato bench {name}" in out and "Examples:" in out and "first" in out
