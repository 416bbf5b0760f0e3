"""pass@k: how likely at least one of k answers to a prompt passes, from n >= k answers of which some passed."""

from collections import defaultdict
from collections.abc import Sequence
from math import comb


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the unbiased estimate from n samples of which c passed, 1 <= k <= n.

    Chen et al., "Evaluating large language models trained on code" (2021), equation 1. Exact integers, so that nothing overflows.
    """
    if not 1 <= k <= num_samples or not 0 <= num_passed <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples of which {num_passed} passed; expected 1 <= k <= n and 0 <= c <= n")
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def reported_ks(n_samples_per_prompt: int) -> tuple[int, ...]:
    """The powers of two below n, and n; none for one answer per prompt, whose pass rate is its mean reward."""
    if n_samples_per_prompt == 1:
        return ()
    powers = (2**exponent for exponent in range(n_samples_per_prompt.bit_length()))
    return (*(k for k in powers if k < n_samples_per_prompt), n_samples_per_prompt)


def pass_rates(
    rewards: Sequence[float], group_ids: Sequence[int], *, threshold: float, n_samples_per_prompt: int
) -> dict[str, float]:
    """ "pass@k" -> mean over prompts of pass_at_k. An answer passes when its reward is at least `threshold`.

    Answers to one prompt share a group id. A prompt that has lost answers counts with those it has, and for no larger k; a k that
    no prompt has enough answers for is left out.
    """
    passed: dict[int, list[bool]] = defaultdict(list)
    for reward, group in zip(rewards, group_ids, strict=True):
        passed[group].append(reward >= threshold)
    rates = {}
    for k in reported_ks(n_samples_per_prompt):
        found = [pass_at_k(len(answers), sum(answers), k) for answers in passed.values() if len(answers) >= k]
        if found:
            rates[f"pass@{k}"] = sum(found) / len(found)
    return rates
