import pytest

import legato
from legato.bench.prompts import Prompts


def test_the_same_seed_and_key_give_the_same_text_and_others_do_not() -> None:
    one, other = Prompts(1), Prompts(2)
    assert one.text("a", 50) == Prompts(1).text("a", 50)
    starts = {text.split()[0:4].__repr__() for text in (one.text("a", 50), one.text("b", 50), other.text("a", 50))}
    assert len(starts) == 3


@pytest.mark.parametrize("size", [1, 2, 17, 3000])
def test_without_a_tokenizer_a_word_is_a_token(size: int) -> None:
    assert len(Prompts(0).text("k", size).split()) == size


@pytest.mark.parametrize("size", [1, 2, 3, 64, 999])
def test_with_a_tokenizer_the_tokens_are_counted(llm: legato.LLM, size: int) -> None:
    prompts = Prompts(5, lambda text: len(llm.tokenize(text)))
    assert len(llm.tokenize(prompts.text("k", size))) == size


def test_words_of_several_tokens_come_close_and_never_over() -> None:
    prompts = Prompts(5, lambda text: 3 * len(text.split()) + 1)
    assert [len(prompts.text("k", size).split()) for size in (1, 7, 9, 10)] == [1, 2, 2, 3]
