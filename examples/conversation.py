"""A conversation: the second turn reads only what is new, the rest is still in the KV cache."""

import legato

with legato.open("smollm2", slots=1) as llm:
    messages = [{"role": "system", "content": "You are brief."}]
    for question in ("My cat is called Mono. Suggest a toy for her.", "And what was her name again?"):
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, max_tokens=50, temperature=0)
        messages.append({"role": "assistant", "content": answer.text})
        print(f"> {question}\n{answer.text}")
        print(f"  ({answer.usage.prompt_tokens} prompt tokens, {answer.usage.cached_tokens} of them from cache)\n")
