"""How sure was the model? Log probabilities with alternatives, for a raw completion."""

import math

import legato

with legato.open("smollm2", slots=1) as llm:
    answer = llm.complete("The capital of France is", temperature=0, max_tokens=5, logprobs=3)
    for entry in answer.choices[0].logprobs:
        others = ", ".join(f"{top.text!r} {math.exp(top.logprob):.0%}" for top in entry.top)
        print(f"{entry.chosen.text!r:12} {math.exp(entry.chosen.logprob):4.0%}   of: {others}")
