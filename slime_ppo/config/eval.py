"""Section `eval`: greedy responses to held-out prompts."""

from dataclasses import dataclass

from slime_ppo.config.fields import option


@dataclass(frozen=True)
class EvalConfig:
    """When and on what the actor is evaluated."""

    eval_interval: int = option(
        0, help="evaluate every so many rollouts, before the first and after the last too; 0 = never", unit="rollouts", at_least=0
    )
    eval_prompt_data: str | None = option(None, help="held-out prompt file, same keys as --prompt-data", default_text="no file")
    eval_max_response_len: int | None = option(
        None,
        help="a held-out response is cut after this many tokens",
        unit="tokens",
        default_text="same as --rollout-max-response-len",
        at_least=1,
    )
