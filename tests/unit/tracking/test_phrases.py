import pytest

from slime_ppo.tracking.phrases import Phrase, common_phrases


def test_common_phrases_counts_each_response_once_whatever_it_repeats() -> None:
    responses = ["so so so so happy", "a happy day", "a happy end", "nothing of the kind"]
    assert common_phrases(responses, most=2) == (Phrase("a happy", 0.5), Phrase("happy day", 0.25))
    assert Phrase("so so", 0.25) in common_phrases(responses, most=20)


def test_common_phrases_ignores_case_and_punctuation_and_crosses_lines() -> None:
    responses = ["“GREAT, joy!”", "_Great_\njoy", "great—joy...", "(great) 'joy'"]
    assert common_phrases(responses) == (Phrase("great joy", 1.0),)


def test_common_phrases_keeps_apostrophes_within_words_and_letters_of_any_alphabet() -> None:
    assert common_phrases(["Don't cry", "don't CRY."]) == (Phrase("don't cry", 1.0),)
    assert common_phrases(["Très GROSSE STRASSE", "très große straße"], most=2) == (
        Phrase("grosse strasse", 1.0),
        Phrase("très grosse", 1.0),
    )


def test_common_phrases_of_equal_share_are_ordered_by_alphabet() -> None:
    assert [phrase.text for phrase in common_phrases(["d c b a", "b d"], most=3)] == ["b a", "b d", "c b"]


@pytest.mark.parametrize(("words", "text"), [(1, "the"), (3, "of the kind")])
def test_common_phrases_of_another_number_of_words(words: int, text: str) -> None:
    responses = ["of the kind", "all of the kind", "the the"]
    assert common_phrases(responses, words=words, most=1) == (Phrase(text, {1: 1.0, 3: 2 / 3}[words]),)


def test_common_phrases_of_short_responses_count_them_among_the_responses() -> None:
    assert common_phrases(["good day", "good", "", "…"]) == (Phrase("good day", 0.25),)


@pytest.mark.parametrize("responses", [[], ["", "word", "?!"]])
def test_common_phrases_without_any_is_empty(responses: list[str]) -> None:
    assert common_phrases(responses) == ()
