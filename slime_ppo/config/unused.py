"""Options that this run does not use, for a warning. Not refused: one flag may switch off what a config file sets up."""

from collections.abc import Iterator

from slime_ppo.config.root import OPTIONS, Config
from slime_ppo.ppo_utils.registries import ADVANTAGE_ESTIMATORS

_RESTRICTED = "a restricted sampler (--rollout-top-p, --rollout-top-k or --rollout-min-p)"
_REFERENCE = "--kl-coef above 0 or --use-kl-loss"


def unused_options(config: Config) -> Iterator[tuple[str, str]]:
    """(option, what it needs) for features that are off. Half of a run leaves half of the options without use: none is named."""
    if not (config.trains and config.generates):
        return
    yield from _of_the_estimator(config)
    yield from _of_the_losses(config)
    yield from _of_the_correction(config)
    yield from _of_the_evaluation(config)
    yield from _of_the_reward(config)
    if not config.data.apply_chat_template:
        for name in ("chat_template", "apply_chat_template_kwargs", "tool_key"):
            yield f"data.{name}", "--apply-chat-template"
    if config.batch.use_dynamic_batch_size:
        yield "batch.micro_batch_size", "micro-batches of so many samples (--no-use-dynamic-batch-size)"
    if not config.cluster.colocate:
        yield "cluster.offload", "devices that are shared (--colocate)"
    if config.optimizer.lr_decay_style == "constant":
        yield "optimizer.min_lr", "--lr-decay-style linear or cosine"
        yield "optimizer.lr_decay_iters", "--lr-decay-style linear or cosine"
    if config.model.dtype == "float32":
        yield "model.fp32_lm_head", "--dtype bfloat16"
    if config.rollout.engine != "sglang":
        for spec in OPTIONS:
            if spec.section == "sglang":
                yield spec.key, "--rollout-engine sglang"
    if not config.checkpoint.save_checkpoints:
        for name in ("save_interval", "async_save", "keep_checkpoints"):
            yield f"checkpoint.{name}", "--save-checkpoints"
    if not config.tracking.use_wandb:
        yield "tracking.wandb_project", "--use-wandb"
        yield "tracking.wandb_mode", "--use-wandb"


def _of_the_estimator(config: Config) -> Iterator[tuple[str, str]]:
    ppo = config.ppo
    if not config.has_critic:
        needed = "an --advantage-estimator that has a critic (gae)"
        yield "ppo.value_clip", needed
        yield "ppo.lambd_critic", needed
        for spec in OPTIONS:
            if spec.section == "critic":
                yield spec.key, needed
        # what a user's own estimator reads is not known
        if ppo.advantage_estimator in ADVANTAGE_ESTIMATORS.entries:
            yield "ppo.lambd", needed
            yield "ppo.adaptive_lambd", needed
            if not ppo.estimator_spec.uses_token_rewards:
                yield "ppo.gamma", "an --advantage-estimator that reads token rewards (gae, reinforce_plus_plus)"
    elif config.critic.init_value_head != "normal":
        yield "critic.init_value_head_std", "--init-value-head normal"
    if ppo.advantage_estimator in ADVANTAGE_ESTIMATORS.entries and ppo.advantage_estimator != "grpo":
        yield "ppo.grpo_std_normalization", "--advantage-estimator grpo"
    if not ppo.estimator_spec.uses_groups:
        yield "ppo.masked_in_baseline", "an --advantage-estimator that compares a group (grpo, rloo, reinforce_plus_plus_baseline)"
    elif ppo.truncation_policy != "mask":
        yield "ppo.masked_in_baseline", "--truncation-policy mask"
    if not ppo.whitens:
        yield "ppo.whiten_domain", "--normalize-advantages"


def _of_the_losses(config: Config) -> Iterator[tuple[str, str]]:
    ppo = config.ppo
    if ppo.kl_coef == 0:
        yield "ppo.kl_reward_type", "--kl-coef above 0"
    if ppo.kl_coef == 0 or not ppo.use_kl_loss:
        yield "ppo.allow_double_kl", "--kl-coef above 0 together with --use-kl-loss"
    if not ppo.needs_reference:
        yield "model.ref_load", _REFERENCE
        yield "ppo.kl_support", _REFERENCE
    elif not config.rollout.restricted:
        yield "ppo.kl_support", _RESTRICTED
    if not config.rollout.restricted:
        yield "ppo.entropy_support", _RESTRICTED


def _of_the_evaluation(config: Config) -> Iterator[tuple[str, str]]:
    if config.rollout.n_samples_per_prompt == config.eval.eval_n_samples_per_prompt == 1:
        yield "reward.pass_threshold", "--n-samples-per-prompt or --eval-n-samples-per-prompt above 1"
    if config.eval.eval_interval == 0:
        for spec in OPTIONS:
            if spec.section == "eval":
                yield spec.key, "--eval-interval above 0"
    elif config.eval.eval_temperature == 0:
        for name in ("eval_top_p", "eval_top_k", "eval_min_p"):
            yield f"eval.{name}", "--eval-temperature above 0"


def _of_the_correction(config: Config) -> Iterator[tuple[str, str]]:
    correction = config.correction
    if correction.mode == "none":
        yield "correction.level", "--rollout-correction tis or icepop"
    if correction.mode != "tis":
        yield "correction.cap", "--rollout-correction tis"
    if correction.mode != "icepop":
        yield "correction.low", "--rollout-correction icepop"
        yield "correction.high", "--rollout-correction icepop"
    if correction.rejection == "none":
        yield "correction.rejection_low", "--rollout-rejection sequence or geometric"
        yield "correction.rejection_high", "--rollout-rejection sequence or geometric"
    if correction.use_rollout_log_probs:
        yield "rollout.max_logprob_gap", "log-probs that are recomputed (--no-use-rollout-log-probs)"


def _of_the_reward(config: Config) -> Iterator[tuple[str, str]]:
    served_by = config.reward.served_by
    if served_by is None:
        for name in ("rm_url", "rm_timeout_s", "rm_max_attempts", "rm_api_key_file"):
            yield f"reward.{name}", "--rm-type remote or reward_model, and no --custom-rm-path"
    if served_by != "remote":
        yield "reward.rm_concurrency", "--rm-type remote"
    if served_by != "reward_model":
        yield "reward.rm_input", "--rm-type reward_model"
