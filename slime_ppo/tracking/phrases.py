"""What a policy says most often, as data: the word pairs that the most responses share."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest

# letters and digits, with apostrophes between them; what stands around a word is punctuation
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


@dataclass(frozen=True)
class Phrase:
    """Words in a row, lower case, and the share of responses that contain them, in (0, 1]."""

    text: str
    share: float


def common_phrases(responses: Sequence[str], *, words: int = 2, most: int = 5) -> tuple[Phrase, ...]:
    """The `most` phrases of `words` words that the most responses contain, most common first, equal ones by alphabet.

    A response counts once, however often it repeats a phrase, so that one response that loops does not look like a policy
    that does. Case and punctuation do not count: "Happy, happy!" contains "happy happy". A response with fewer words
    contains no phrase, but counts among the responses.

    Example: common_phrases(["A great day, a great joy.", "a GREAT tea"], most=1) == (Phrase("a great", 1.0),)
    """
    counts: Counter[tuple[str, ...]] = Counter()
    for response in responses:
        found = _WORD.findall(response.casefold())
        counts.update(set(zip(*(found[first:] for first in range(words)), strict=False)))  # the last words begin no phrase
    top = nsmallest(most, counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Phrase(" ".join(phrase), count / len(responses)) for phrase, count in top)
