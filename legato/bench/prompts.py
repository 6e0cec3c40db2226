"""Prompts of words drawn at random: the same seed gives the same prompt, and no two share a beginning.

So nothing can come from a prompt cache unless the benchmark sends the same text twice on purpose.
"""

import random
from collections.abc import Callable

CountTokens = Callable[[str], int]

# Common words: one token each in nearly every English vocabulary.
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information back parent face others
level office door health person art song history party result change morning reason research girl guy moment air teacher
force education good new first last long great little own other old big high different small large next early young
important few public bad same able see come think look want give use find tell ask seem feel try leave call keep let
begin show hear play run move like live believe hold bring happen write provide sit stand lose pay meet include continue
set learn lead understand watch follow stop create speak read allow add spend grow open walk win offer remember love
consider appear buy wait serve rest send expect build stay fall cut reach keep remain suggest raise pass sell require
report decide pull because about under over after before while where when green blue red white black bright cold warm
river mountain forest island bridge garden window table paper stone light sound music color letter market street north
south east west summer winter spring
"""
_WORDS = _TEXT.split()


class Prompts:
    """A source of texts. count: tokens of a text, where a tokenizer is at hand; else a word counts as a token."""

    def __init__(self, seed: int, count: CountTokens | None = None) -> None:
        self.seed = seed
        self.is_exact = count is not None
        self._count = count

    def text(self, key: str, num_tokens: int) -> str:
        """Words that come to `num_tokens` tokens, or as many as fit below it; at least one word.

        key: names the prompt. Another key, another text.
        """
        rng = random.Random(f"{self.seed}/{key}")
        words = [rng.choice(_WORDS) for _ in range(max(num_tokens, 1))]
        return " ".join(words[: self._fitting(words, num_tokens)])

    def story(self, key: str) -> str:
        """A short question whose answer is long."""
        return f"Write a very long story about these words: {self.text(key, 6)}. Never stop writing."

    def question(self, key: str) -> str:
        return f"Which of the words is like these: {self.text(key, 4)}?"

    def _fitting(self, words: list[str], num_tokens: int) -> int:
        """The most words that have at most num_tokens tokens; more words never have fewer tokens."""
        if self._count is None:
            return len(words)
        low, high = 1, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._count(" ".join(words[:middle])) <= num_tokens else (low, middle - 1)
        return low
