"""Legato's engine against bare loops over libllama, interleaved.

    python benchmarks/engine.py              all four figures, about three minutes
    python benchmarks/engine.py single       one of: single, batch, cold, memory

Prints medians and ratios; `--json FILE` keeps every number. Run it on a machine that does nothing else: each figure
is a ratio of interleaved runs, so slow drifts cancel, but a neighbour's load does not.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import legato
from legato.llama.batch import BatchBuffer, BatchRow
from legato.llama.library import load_library
from legato.models.registry import resolve

TOKENS, STREAMS = 128, 8
SHORT = 36  # tokens of a short prompt: one chunk
THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class BareLoop:
    """llama_decode and argmax, nothing else: no scheduler, no text, no threads of its own."""

    def __init__(self, path: Path, slots: int, context: int) -> None:
        lib = self.lib = load_library()
        self.model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = context * slots, slots, False
        params.n_batch = params.n_ubatch = 128
        params.n_threads = params.n_threads_batch = THREADS
        params.flash_attn_type, params.no_perf = 0, True
        self.context = lib.llama_init_from_model(self.model, params)
        self.memory = lib.llama_get_memory(self.context)
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = BatchBuffer(128)

    def decode(self, rows: list[BatchRow]) -> Any:
        wanted = self.batch.fill(rows)
        if self.lib.llama_decode(self.context, self.batch.raw) != 0:
            sys.exit("llama_decode failed")
        if not wanted:
            return np.empty((0, self.vocab_size))
        return np.ctypeslib.as_array(self.lib.llama_get_logits(self.context), shape=(wanted, self.vocab_size))

    def generate(self, prompt: list[int], count: int, streams: int = 1) -> tuple[float, float]:
        """(seconds to the first token, seconds from the first tokens to the last), all streams together."""
        for slot in range(streams):
            self.lib.llama_memory_seq_rm(self.memory, slot, -1, -1)
        begin = time.perf_counter()
        tokens = []
        for slot in range(streams):
            for start in range(0, len(prompt), 128):
                chunk = prompt[start : start + 128]
                logits = self.decode([BatchRow(slot, start, chunk, wants_logits=start + len(chunk) == len(prompt))])
            tokens.append(int(logits[0].argmax()))
        first = time.perf_counter()
        for step in range(count - 1):
            rows = [BatchRow(slot, len(prompt) + step, [tokens[slot]], wants_logits=True) for slot in range(streams)]
            logits = self.decode(rows)
            tokens = [int(row.argmax()) for row in logits]
        return first - begin, time.perf_counter() - first


class Child:
    """One side of a comparison in a process of its own: two OpenMP pools in one process would slow each other down."""

    def __init__(self, side: str, figure: str) -> None:
        command = [sys.executable, __file__, "--serve", f"{side} {figure}"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, turn: int) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{turn}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit("the other side died")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve(side: str, figure: str) -> None:
    """Answer one measurement per line of stdin."""
    run = SIDES[side, figure]()
    for line in sys.stdin:
        print(json.dumps(run(int(line))), flush=True)


def _prompt_ids(turn: int) -> list[int]:
    """About 140 tokens, another prompt each time: nothing comes from cache."""
    rng = np.random.default_rng(turn)
    return [int(token) for token in rng.integers(100, 40_000, 140)]


def bare_single() -> Callable[[int], dict[str, float]]:
    bare = BareLoop(resolve("smollm2").path, 1, 1024)

    def run(turn: int) -> dict[str, float]:
        short, _ = bare.generate(_prompt_ids(1000 + turn)[:SHORT], 1)
        ttft, decode = bare.generate(_prompt_ids(turn), TOKENS)
        return {"tok/s": (TOKENS - 1) / decode, "ttft, 140 tokens": ttft, f"ttft, {SHORT} tokens": short}

    return run


def legato_single() -> Callable[[int], dict[str, float]]:
    llm = legato.open("smollm2", slots=1, context=1024, threads=THREADS)

    def run(turn: int) -> dict[str, float]:
        begin = time.perf_counter()
        llm.complete(_prompt_ids(1000 + turn)[:SHORT], temperature=0, max_tokens=1, ignore_eos=True)
        short = time.perf_counter() - begin
        begin = time.perf_counter()
        stream = llm.stream_completion(_prompt_ids(turn), temperature=0, max_tokens=TOKENS, ignore_eos=True)
        events = (event for event in stream if isinstance(event, legato.TextDelta))
        next(events)
        first = time.perf_counter()
        for _ in events:
            pass
        rate = (TOKENS - 1) / (time.perf_counter() - first)
        return {"tok/s": rate, "ttft, 140 tokens": first - begin, f"ttft, {SHORT} tokens": short}

    return run


def bare_batch() -> Callable[[int], dict[str, float]]:
    bare = BareLoop(resolve("smollm2").path, STREAMS, 512)

    def run(turn: int) -> dict[str, float]:
        _, decode = bare.generate(_prompt_ids(turn)[:16], TOKENS, STREAMS)
        return {"tok/s": STREAMS * (TOKENS - 1) / decode}

    return run


def legato_batch() -> Callable[[int], dict[str, float]]:
    llm = legato.open("smollm2", slots=STREAMS, context=512, threads=THREADS)

    def run(turn: int) -> dict[str, float]:
        options: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        prompt = _prompt_ids(turn)[:16]
        running = [llm.stream_completion(prompt, **options) for _ in range(STREAMS)]
        answers = [stream.answer() for stream in running]
        # The sum of the streams' own speeds: the first one's includes a step in which the others' prompts are read.
        return {"tok/s": sum(answer.timing.tokens_per_s or 0 for answer in answers)}

    return run


SIDES = {
    ("bare", "single"): bare_single,
    ("legato", "single"): legato_single,
    ("bare", "batch"): bare_batch,
    ("legato", "batch"): legato_batch,
}


def _interleaved(figure: str, title: str, rounds: int) -> dict[str, Any]:
    sides = {side: Child(side, figure) for side in ("bare", "legato")}
    rows: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for side, child in sides.items():
            for kind, value in child.ask(turn).items():
                if turn:  # the first round warms up
                    rows.setdefault(f"{side} {kind}", []).append(value)
    for child in sides.values():
        child.close()
    return _compare(title, rows)


def single(rounds: int) -> dict[str, Any]:
    """One stream: tok/s of decode, and time to the first token."""
    return _interleaved("single", f"single stream, {TOKENS} tokens", rounds)


def batch(rounds: int) -> dict[str, Any]:
    """Eight streams at once: total tok/s of decode."""
    return _interleaved("batch", f"{STREAMS} streams, 16 prompt tokens, {TOKENS} tokens each", rounds)


def cold(rounds: int) -> dict[str, Any]:
    """`legato run hi` from process start to the first byte of the answer."""
    command = [str(Path(sys.executable).with_name("legato")), "run", "hi", "--max-tokens", "8", "--temperature", "0"]
    firsts = []
    for _ in range(rounds):
        begin = time.perf_counter()
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            if not process.stdout.read(1):
                sys.exit("legato run said nothing")
            firsts.append(time.perf_counter() - begin)
            process.stdout.read()
    median = statistics.median(firsts)
    print(f"cold start of `legato run hi` to the first byte: median {median:.3f} s (best {min(firsts):.3f})")
    return {"what": "cold", "seconds": firsts, "median": median}


def memory(rounds: int) -> dict[str, Any]:
    """Resident memory over a thousand short generations."""
    total = 1000 if rounds > 1 else 100
    process = psutil.Process()
    samples = []
    # Without the RAM tier of the prefix cache, which is meant to grow up to its budget.
    with legato.open("smollm2", slots=4, context=512, cache_ram_mb=0) as llm:
        for done in range(0, total, 4):
            running = [llm.stream(f"Say {done + i}.", max_tokens=4, seed=i, temperature=1) for i in range(4)]
            for stream in running:
                stream.answer()
            if (done + 4) % (total // 10) == 0:
                samples.append(process.memory_info().rss / 2**20)
                print(f"\r{done + 4} generations: {samples[-1]:.1f} MiB", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    growth = samples[-1] - samples[0]
    print(f"resident memory over {total} generations: {samples[0]:.1f} → {samples[-1]:.1f} MiB ({growth:+.1f})")
    return {"what": "memory", "mib": samples, "growth_mib": growth}


def _compare(title: str, rows: dict[str, list[float]]) -> dict[str, Any]:
    print(title)
    result: dict[str, Any] = {"what": title, "runs": rows}
    for kind in [name.removeprefix("bare ") for name in rows if name.startswith("bare ")]:
        bare, ours = rows[f"bare {kind}"], rows[f"legato {kind}"]
        if kind == "tok/s":
            ratio = statistics.median(b / a for a, b in zip(bare, ours, strict=True))
            print(
                f"  tok/s: bare {statistics.median(bare):.1f}, legato {statistics.median(ours):.1f}, ratio {ratio:.3f}"
            )
            result["tok_s_ratio"] = ratio
        else:
            extra = 1000 * statistics.median(b - a for a, b in zip(bare, ours, strict=True))
            medians = 1000 * statistics.median(bare), 1000 * statistics.median(ours)
            print(f"  {kind}: bare {medians[0]:.1f} ms, legato {medians[1]:.1f} ms, difference {extra:+.1f} ms")
            result[f"{kind} difference_ms"] = extra
    return result


FIGURES: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "single": (single, 11),
    "batch": (batch, 11),
    "cold": (cold, 9),
    "memory": (memory, 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", nargs="*", choices=[*FIGURES, []], help="which figures; all when left out")
    parser.add_argument("--rounds", type=int, help="rounds per figure")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write every number to this file")
    args = parser.parse_args()
    if args.serve:
        side, figure = args.serve.split()
        serve(side, figure)
        return
    results = []
    for name in args.figure or FIGURES:
        run, rounds = FIGURES[name]
        results.append(run(args.rounds or rounds))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
