"""Four questions at once on one model: they share each forward pass, and each gets the text it would get alone."""

import asyncio

import legato

QUESTIONS = ["What is a comet?", "What is a glacier?", "What is a volcano?", "What is a reef?"]


async def main() -> None:
    with legato.open("smollm2", slots=4, context=1024) as llm:
        answers = await asyncio.gather(*(llm.stream(q, max_tokens=30, temperature=0) for q in QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question}\n  {answer.text.strip()}\n")


asyncio.run(main())
