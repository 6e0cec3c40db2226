"""Three ways to stop: a callback that returns False, leaving the block, and cancel() from another thread."""

import threading

import legato

with legato.open("smollm2", slots=1) as llm:
    answer = llm.chat("Tell me a long story.", on_delta=lambda text: "." not in text)
    print(f"until the first full stop: {answer.text!r} ({answer.finish_reason})")

    with llm.stream("Tell me a long story.") as stream:
        for count, _event in enumerate(stream):
            if count == 5:
                break  # leaving the block cancels and frees the slot

    stream = llm.stream("Tell me a long story.", ignore_eos=True)
    threading.Timer(0.5, stream.cancel).start()
    answer = stream.answer()
    print(f"after half a second: {answer.usage.completion_tokens} tokens ({answer.finish_reason})")
