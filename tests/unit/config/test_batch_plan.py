"""The batch words with numbers."""

from slime_ppo.config.batch_plan import batch_plan_text
from tests.helpers.configs import make_config


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_batch_plan_text_gives_each_word_its_number() -> None:
    config = make_config(
        rollout__rollout_batch_size=16,
        rollout__n_samples_per_prompt=4,
        rollout__rollout_max_response_len=8,
        data__rollout_max_prompt_len=24,
        batch__global_batch_size=32,
        ppo__num_epochs_per_rollout=3,
        ppo__num_critic_only_steps=5,
        parallel__actor_num_gpus_per_node=2,
        critic__num_gpus_per_node=1,
    )
    # 16 x 4 samples of 24 + 8 tokens; 64 / 32 steps x 3 passes; 25 rollouts, 20 of them with the actor
    assert _lines(batch_plan_text(config)) == [
        "num_rollout 25 rollouts in the whole run",
        "num_critic_only_steps 5 of them train the critic only, the first ones",
        "rollout_batch_size 16 prompts per rollout",
        "n_samples_per_prompt 4 samples per prompt",
        "64 samples per rollout",
        "2048 tokens per rollout at most, 32 a sample",
        "global_batch_size 32 samples per optimizer step over all ranks: 16 per actor rank (DP 2), 32 per critic rank (DP 1)",
        "micro_batch_size 8 samples per micro-batch of a rank; never changes the gradient",
        "num_epochs_per_rollout 3 passes x 2 steps",
        "6 optimizer steps per rollout and role",
        "150 planned steps of the critic",
        "120 planned steps of the actor",
    ]


def test_batch_plan_text_of_dynamic_batches_names_the_token_limit() -> None:
    text = batch_plan_text(make_config(batch__use_dynamic_batch_size=True, batch__max_tokens_per_gpu=4096))
    assert "max_tokens_per_gpu 4096 tokens per micro-batch of a rank; never changes the gradient" in _lines(text)


def test_batch_plan_text_without_a_critic_has_no_line_of_it() -> None:
    lines = _lines(batch_plan_text(make_config(ppo__advantage_estimator="grpo", rollout__n_samples_per_prompt=4)))
    assert "global_batch_size 128 samples per optimizer step over all ranks: 128 per actor rank (DP 1)" in lines
    assert lines[-2:] == ["4 optimizer steps per rollout", "100 planned steps of the actor"]
    assert not any("critic" in line for line in lines)
