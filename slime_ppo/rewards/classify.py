"""The answers of /classify, by which an SGLang server tells the scores of a classification model."""

from collections.abc import Sequence

from slime_ppo.errors import RewardError
from slime_ppo.rewards.server_words import shortened


def classify_url(url: str) -> str:
    """Where the server at `url` is asked for scores."""
    return url.rstrip("/") + "/classify"


def parse_scores(answer: object, num_tokens: Sequence[int | None], url: str) -> list[object]:
    """The scores in an answer of /classify: a list with `{"embedding": [score], "meta_info": {"prompt_tokens": n}}` per input.

    `num_tokens` are the tokens of each input, None where the server counted them. Raises RewardError for any other form, for
    more than one label, and for an input of which the server has read another number of tokens.
    """
    if not isinstance(answer, list) or len(answer) != len(num_tokens):
        shown = f"{len(answer)} entries" if isinstance(answer, list) else shortened(str(answer))
        raise RewardError(f"POST {url} answered {shown}, expected a list of {len(num_tokens)} scores")
    scores: list[object] = []
    for entry, expected in zip(answer, num_tokens, strict=True):
        try:
            labels, read = entry["embedding"], entry["meta_info"]["prompt_tokens"]
        except (TypeError, KeyError) as error:
            raise RewardError(
                f"POST {url} answered {shortened(str(entry))}, expected embedding and meta_info.prompt_tokens"
            ) from error
        if not isinstance(labels, list) or len(labels) != 1:
            raise RewardError(f"POST {url} answered {shortened(str(labels))}, expected one label: a model with num_labels 1")
        if expected is not None and read != expected:
            raise RewardError(f"POST {url} has read {read} of {expected} tokens: start the server without --allow-auto-truncate")
        scores.append(labels[0])
    return scores
