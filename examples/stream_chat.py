"""Stream an answer to the terminal, then say how fast it was."""

import legato

with legato.open("smollm2") as llm, llm.stream("Why is the sky blue?", max_tokens=60) as stream:
    for text in stream.text():
        print(text, end="", flush=True)

timing = stream.timing
assert timing is not None and timing.ttft_s is not None
print(f"\n({timing.ttft_s * 1000:.0f} ms to the first text, {timing.tokens_per_s or 0:.0f} tokens a second)")
