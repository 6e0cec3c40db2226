"""Sixteen questions alone, then all at once: every answer must be the same. Exit status 1 if one differs."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import legato

SUBJECTS = [
    *("a comet", "a glacier", "a volcano", "a reef", "a desert", "a delta", "a monsoon", "an eclipse"),
    *("a fjord", "a geyser", "a lagoon", "a tundra", "an atoll", "a canyon", "an oasis", "a prairie"),
]


def main() -> None:
    with legato.open("smollm2", slots=16, context=512) as llm:

        def ask(subject: str) -> legato.Answer:
            return llm.chat(f"What is {subject}?", temperature=0, max_tokens=48)

        begin = time.perf_counter()
        alone = [ask(subject) for subject in SUBJECTS]
        alone_s = time.perf_counter() - begin
        begin = time.perf_counter()
        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(ask, SUBJECTS))
        together_s = time.perf_counter() - begin
    different = 0
    for subject, one, other in zip(SUBJECTS, alone, together, strict=True):
        same = one.text == other.text
        different += not same
        start = " ".join(one.text.split())[:60]
        print(f"{subject:10} {one.usage.completion_tokens:3} tokens  {'same' if same else 'DIFFERENT':9}  {start}…")
    print(f"one after the other {alone_s:.1f} s, all at once {together_s:.1f} s; {different} of 16 differ")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
