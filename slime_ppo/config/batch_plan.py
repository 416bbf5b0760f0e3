"""The batch words with this run's numbers, printed at the start of every run and by `--dry-run`."""

from slime_ppo.config.root import Config


def batch_plan_text(config: Config) -> str:
    """One line per word: its number, its unit, what follows from it."""
    rows = [*_rollout_rows(config), *(_step_rows(config) if config.trains else [])]
    name_width = max(len(name) for name, _, _ in rows)
    number_width = max(len(number) for _, number, _ in rows)
    return "\n".join(f"{name:<{name_width}}  {number:>{number_width}}  {meaning}" for name, number, meaning in rows) + "\n"


def _rollout_rows(config: Config) -> list[tuple[str, str, str]]:
    rollout = config.rollout
    critic_only = ("num_critic_only_steps", str(config.ppo.num_critic_only_steps), "of them train the critic only, the first ones")
    return [
        ("num_rollout", str(config.run.num_rollout), "rollouts in the whole run"),
        *([critic_only] if config.has_critic else []),
        ("rollout_batch_size", str(rollout.rollout_batch_size), "prompts per rollout"),
        ("n_samples_per_prompt", str(rollout.n_samples_per_prompt), "samples per prompt"),
        ("", str(config.samples_per_rollout), "samples per rollout"),
        (
            "",
            str(config.samples_per_rollout * config.max_sample_tokens),
            f"tokens per rollout at most, {config.max_sample_tokens} a sample",
        ),
    ]


def _step_rows(config: Config) -> list[tuple[str, str, str]]:
    batch, dp_sizes = config.batch, {role: config.role(role).dp_size for role in config.roles}
    per_rank = ", ".join(f"{batch.global_batch_size // size} per {role} rank (DP {size})" for role, size in dp_sizes.items())
    if batch.use_dynamic_batch_size:
        memory = (
            "max_tokens_per_gpu",
            str(batch.max_tokens_per_gpu),
            "tokens per micro-batch of a rank; never changes the gradient",
        )
    else:
        memory = ("micro_batch_size", str(batch.micro_batch_size), "samples per micro-batch of a rank; never changes the gradient")
    return [
        ("global_batch_size", str(batch.global_batch_size), f"samples per optimizer step over all ranks: {per_rank}"),
        memory,
        ("num_epochs_per_rollout", str(config.ppo.num_epochs_per_rollout), f"passes x {config.steps_per_pass} steps"),
        ("", str(config.steps_per_rollout), f"optimizer steps per rollout{' and role' if config.has_critic else ''}"),
        *([("", str(config.planned_critic_steps), "planned steps of the critic")] if config.has_critic else []),
        ("", str(config.planned_actor_steps), "planned steps of the actor"),
    ]
