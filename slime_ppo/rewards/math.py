"""Answers to mathematical questions: 1 when the last answer of the response is the label's, by math-verify."""

import logging
import re
from collections.abc import Sequence
from functools import lru_cache

from slime_ppo.errors import ConfigError
from slime_ppo.rewards.base import RewardFailure, RewardInput

# behind this mark stands the answer, in GSM8K's labels and in responses of models that learned from them
_MARK = "####"
_BOX = "\\boxed{"
# an answer is at the end, and the search for one in running text slows down with the square of its length
_SEARCHED_CHARS = 2000
_LONGEST_ANSWER_CHARS = 500
# a label of letters is a text: math-verify would read a word as a product of letters, equal to each of its anagrams
_TEXT = re.compile(r"[^\W\d_]+(?:[ '’.,/()-]+[^\W\d_]+)*")
_LETTERS = re.compile(r"[^\W\d_]+")
# what stands behind the last of these, to the end of its line or of one of its sentences, is the answer
_PHRASE = re.compile(r"\b(?:answer|(?:correct|right) (?:option|choice))\b[*_ ]*(?:is\b[*_ ]*:?|:)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?。](?=\s|$)")
# LaTeX and Markdown around a text, and what may enclose it: nothing that changes what a formula says
_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_BOLD_OR_FORMULA = re.compile(r"\*\*|\\[()\[\]]")
# a letter with what it stands for, which names no other letter: "b) paris", but not "b) or c)" and not "b) paris c) rome"
_OTHER_LETTER = r"(?<![\w'’])(?!a\b(?![).:,]|$))[^\W\d_]\b"
_CHOICE = re.compile(rf"([^\W\d_])[).:] (?!.*{_OTHER_LETTER}).+")
# what math-verify stumbles over: a dot behind a number, a thin space in it
_DOT = re.compile(r"(?<!\.)\.$")
_THIN_SPACE = re.compile(r"(?<=\d)\\,(?=\d{3}(?!\d))")
_MINUS = "\N{MINUS SIGN}"
_AROUND = ' \t\r.,;:()"`“”‘’$'


class MathReward:
    """1.0 for a response whose answer equals the label, 0.0 for another or none.

    The answer is what stands in the last \\boxed{...} that is closed, else behind the last ####. Else it is the last expression or
    number of the text as math-verify finds it; or for a label of letters alone, what the last "answer is ..." or "answer: ..."
    says, and where that is missing and the label is one word, the last word. The label itself may be marked by a box or ####.

    Equal is what math-verify shows to be equal: 1/2 and 0.5, {1, 2} and {2, 1}, x = 5 and 5, 50% and 0.5, 2 + 3 and 5.
    Labels of letters are one letter (a choice), "no", a word of three letters or more, or several words; they are equal as texts,
    whatever their case, in parentheses or bold or with a dot or not. A text that holds the label among other words is not equal
    to it; but a letter may be followed by what it stands for, as in "B) Paris".

    An expression like 9^(9^(9^9)) takes forever. math-verify's own time limit is off, since it needs a signal and with it the
    main thread; the process that runs this function is killed at --reward-timeout-s instead, and the sample is named.
    """

    def __init__(self) -> None:
        try:
            import math_verify
        except ImportError as error:
            raise ConfigError(f"--rm-type math needs the package math-verify ({error}): pip install 'slime-ppo[math]'") from error
        self._math = math_verify
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the time limit that is off
        # sympy takes a second to get going, which is no sample's fault
        self._equal("1/2", "\\boxed{0.5}")

    def __call__(self, inputs: Sequence[RewardInput]) -> list[float | RewardFailure]:
        return [self._score(item.label, item.response) for item in inputs]

    def _score(self, label: str | None, response: str) -> float | RewardFailure:
        if label is None:
            return RewardFailure("needs a label to compare with, and the prompt has none (--label-key)")
        right = _marked(label)
        right = label.strip() if right is None else right
        if not _is_text(_plain(right)) and not self._parsed_label(right):
            return RewardFailure(f"found no answer in the label {label[-60:]!r}")
        return float(self._equal(right, response))

    def _equal(self, right: str, response: str) -> bool:
        response = response.replace(_MINUS, "-")
        answer, text = _marked(response), _plain(right)
        if answer is not None and len(answer) > _LONGEST_ANSWER_CHARS:
            return False
        if _is_text(text):
            one_word = len(_LETTERS.findall(text)) == 1 < len(text)
            said = _said(response, one_word=one_word) if answer is None else [_plain(answer)]
            return text in said or (len(text) == 1 and text in map(_chosen, said[-1:]))
        parsed = self._math.parse(response[-_SEARCHED_CHARS:], parsing_timeout=None) if answer is None else self._parsed(answer)
        return bool(self._math.verify(self._parsed_label(right), parsed, timeout_seconds=None))

    def _parsed(self, answer: str) -> list[object]:
        answer = _THIN_SPACE.sub("", _DOT.sub("", answer.strip("* ")))
        found: list[object] = self._math.parse(f"{_BOX}{answer}}}", parsing_timeout=None)
        return found

    @lru_cache(maxsize=1024)  # noqa: B019  one object in a process
    def _parsed_label(self, label: str) -> list[object]:
        """The samples of a prompt share their label."""
        return self._parsed(label)


def _marked(text: str) -> str | None:
    """The answer in the last box that is closed, or else on the line of the last mark; None where there is neither."""
    box = _last_box(text)
    if box is not None:
        return box.strip()
    _, mark, behind = text.rpartition(_MARK)
    return behind.strip().split("\n")[0].strip() if mark else None


def _last_box(text: str) -> str | None:
    """What is in the closed box that begins last. One pass: a policy that has lost its way repeats `\\boxed{` a thousand times."""
    boxes = {found.end() for found in re.finditer(re.escape(_BOX), text)}
    opened: list[int] = []
    last = (-1, -1)
    for found in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if found[0] == "{":
            opened.append(found.end())
        elif found[0] == "}" and opened:
            start = opened.pop()
            if start in boxes:
                last = max(last, (start, found.start()))
    return None if last[0] < 0 else text[slice(*last)]


def _plain(text: str) -> str:
    """A text as it is compared: without what is around it, in lower case, with single spaces."""
    text = _BOLD_OR_FORMULA.sub("", _COMMAND.sub(r"\1", text))
    return " ".join(text.casefold().split()).strip(_AROUND)


def _chosen(plain: str) -> str:
    """The letter of "b) paris"; "" for any other text."""
    choice = _CHOICE.fullmatch(plain)
    return "" if choice is None else choice[1]


def _is_text(plain: str) -> bool:
    """True for a label that is compared as a text: ab and x, y may be formulas, no is none."""
    words = _LETTERS.findall(plain)
    return bool(_TEXT.fullmatch(plain)) and (len(plain) == 1 or plain == "no" or any(len(word) > 2 for word in words))


def _said(response: str, *, one_word: bool) -> list[str]:
    """What the response may mean as its answer, where none is marked: the first sentences of what is behind the last phrase, on its
    line or the next that holds something, and that line.

    Without a phrase it is the last word, where `one_word` is looked for.
    """
    tail = response[-_SEARCHED_CHARS:]
    behind = [found.end() for found in _PHRASE.finditer(tail)]
    if behind:
        line = tail[behind[-1] :].lstrip("*_ \t\r\n").split("\n")[0][:_LONGEST_ANSWER_CHARS]
        return [_plain(line[:end]) for end in (*(found.start() for found in _SENTENCE_END.finditer(line)), len(line))]
    return [word.casefold() for word in _LETTERS.findall(tail)[-1:]] if one_word else []
