"""What one option's bounds cannot say: options that contradict each other, and numbers that do not fit together.

`check_config` is arithmetic; of files it touches the module of a dotted path, and it looks whether transformer-engine is installed.
Every message names the options, their values and where these came from.
"""

import math
from collections.abc import Mapping

from slime_ppo.config.algorithm_checks import check_algorithm
from slime_ppo.config.checked import Checked, cite_restrictions
from slime_ppo.config.data_checks import check_data
from slime_ppo.config.debug_checks import check_debug
from slime_ppo.config.engine_checks import check_engine
from slime_ppo.config.execution_checks import check_execution, check_execution_of_model
from slime_ppo.config.fields import shown
from slime_ppo.config.layout_checks import check_layout, check_layout_of_model
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.reward_checks import check_reward
from slime_ppo.config.roles import RoleName, RoleSettings
from slime_ppo.config.rollout import SGLANG_MAX_TOP_K
from slime_ppo.config.root import OPTION_BY_KEY, Config
from slime_ppo.config.transformer_impl import check_transformer_impl
from slime_ppo.config.unused import unused_options
from slime_ppo.errors import ConfigError


def check_config(config: Config, *, origins: Mapping[str, str] | None = None) -> None:
    """Refuse a config that cannot run or would silently ignore an option. Arithmetic only, but that the module of a dotted path
    (--advantage-estimator, --policy-loss) is imported, and transformer-engine looked for where it is asked for.

    `origins` as in ParsedCommand, for the messages. Raises ConfigError.
    """
    checked = Checked(config, {} if origins is None else origins, config.values())
    for check in (
        _check_bounds,
        check_debug,
        check_algorithm,
        check_data,
        check_reward,
        _check_sampler,
        check_engine,
        check_layout,
        check_execution,
        _check_transformer_impl,
        _check_batch,
        _check_micro_batch,
        _check_schedule,
        _check_weight_bucket,
        _check_eval,
        _check_load,
    ):
        check(checked)


def check_engine_support(config: Config, *, returns_support: bool) -> None:
    """Refuse top-k, top-p and min-p for an engine that does not return the support it sampled from (SEMANTICS 2)."""
    checked = Checked(config, {}, config.values())
    if config.eval.eval_interval > 0 and config.eval.restrictions and not returns_support:
        given = " and ".join(checked.cite(f"eval.{name}") for name in config.eval.restrictions)
        raise ConfigError(
            f"{given}: engine {config.rollout.engine} does not return the support of each token, as every restricted sampler must. "
            "Evaluate greedily (--eval-temperature 0) or without the restriction"
        )
    if config.rollout.restricted and not returns_support:
        raise ConfigError(
            f"the sampler is restricted by {cite_restrictions(checked)}, but engine {config.rollout.engine} does not return the "
            "support of each token, so the trainer's ratios would be of another distribution. Use --rollout-top-p 1, "
            "--rollout-top-k 0 and --rollout-min-p 0, or an engine that returns the support"
        )


def check_model_shape(config: Config, shape: ModelShape, role: RoleName = "actor") -> None:
    """Refuse parallel sizes or a length that the role's model does not allow. Raises ConfigError."""
    if config.trains:
        check_layout_of_model(config.role(role), shape)
        check_execution_of_model(config, config.role(role), shape)
    if config.model.moe_aux_loss_coeff > 0 and shape.moe is None:
        raise ConfigError(
            f"--moe-aux-loss-coeff {config.model.moe_aux_loss_coeff} balances experts, but {config.role(role).hf_folder} of the "
            f"{role} has none. Leave it out"
        )
    _check_lengths(config, shape, config.role(role).hf_folder)


def _check_lengths(config: Config, shape: ModelShape, folder: str) -> None:
    """No sample may be longer than the model's positions, nor than its attention window: up to there a window hides nothing."""
    prompt = config.data.rollout_max_prompt_len
    lengths = {"--rollout-max-response-len": config.rollout.rollout_max_response_len}
    if config.eval.eval_interval:
        lengths["--eval-max-response-len"] = config.eval_max_response_len
    limits = [(shape.max_position_embeddings, "positions (max_position_embeddings)")]
    if shape.attention_window is not None:
        limits.append((shape.attention_window, "tokens in its sliding_window, and longer samples are not in this version"))
    for flag, response in lengths.items():
        for limit, what in limits:
            if prompt + response > limit:
                raise ConfigError(
                    f"--rollout-max-prompt-len {prompt} + {flag} {response} = {prompt + response} tokens, but {folder} has "
                    f"{limit} {what}. Lower one of the two by {prompt + response - limit} or more"
                )


def config_warnings(config: Config) -> tuple[str, ...]:
    """What is allowed but deserves a line at the start of the run."""
    warnings = []
    if config.ppo.kl_coef > 0 and config.ppo.kl_reward_type != "k1":
        warnings.append(
            f"--kl-reward-type {config.ppo.kl_reward_type}: inside the reward only k1 gives the gradient of the KL; use it for "
            "comparison only"
        )
    if config.ppo.policy_loss == "gspo" and config.ppo.reduction != "seq-mean-token-mean":
        warnings.append(
            f"--policy-loss gspo with --loss-reduction {config.ppo.reduction}: the objective of its paper is the mean over samples "
            "of the token mean (seq-mean-token-mean, its default)"
        )
    if config.rollout.sets_top_k:
        warnings.append(
            f"--rollout-top-k {SGLANG_MAX_TOP_K} is set: SGLang returns the support of a restricted sampler only with a finite "
            "top-k, and this is the largest"
        )
    warnings += [
        f"{Checked(config, {}, config.values()).cite(key)} has no effect: it is used only with {needed}"
        for key, needed in unused_options(config)
        if config.values()[key] != OPTION_BY_KEY[key].default
    ]
    for role in config.roles:
        settings = config.role(role)
        if 0 < settings.planned_steps <= settings.lr_warmup_iters:
            warnings.append(
                f"the {role}'s warm-up of {settings.lr_warmup_iters} steps is not over after its {settings.planned_steps} planned "
                f"steps: the learning rate stays below its peak (--{'critic-' if role == 'critic' else ''}lr-warmup-iters)"
            )
    return tuple(warnings)


def _check_bounds(checked: Checked) -> None:
    """The parser has done this for what it read; a config built in Python is checked here."""
    for key, value in checked.values.items():
        spec = OPTION_BY_KEY[key]
        if not spec.admits(value):
            raise ConfigError(spec.refusal(shown(value) or "empty", checked.origin(key)))


def _check_sampler(checked: Checked) -> None:
    if checked.config.rollout.rollout_top_k == 1:
        raise ConfigError(
            f"{checked.cite('rollout.rollout_top_k')} leaves a support of one token: its log-prob is 0 whatever the weights are, "
            "so the policy gradient is exactly 0. Use 0 (off) or at least 2; greedy responses are for evaluation"
        )


def _check_transformer_impl(checked: Checked) -> None:
    check_transformer_impl(checked.config.model, checked.config.cluster.device)


def _check_batch(checked: Checked) -> None:
    config = checked.config
    if not config.trains:
        return
    samples, batch = config.samples_per_rollout, config.batch.global_batch_size
    shards = math.lcm(*(config.role(role).dp_size for role in config.roles))
    works = [size for size in range(shards, samples + 1, shards) if not samples % size]
    below = [size for size in works if size <= batch][-1:]
    above = [size for size in works if size > batch][:1]
    fix = (
        f"Use --global-batch-size {' or '.join(map(str, below + above))}"
        if works
        else f"Make the rollout a multiple of {shards} samples"
    )
    if samples % batch:
        raise ConfigError(
            f"{checked.cite('batch.global_batch_size')} does not divide the {samples} samples of a rollout "
            f"({checked.cite('rollout.rollout_batch_size')} x {checked.cite('rollout.n_samples_per_prompt')}). {fix}"
        )
    for role in config.roles:
        dp_size = config.role(role).dp_size
        if batch % dp_size:
            raise ConfigError(
                f"{checked.cite('batch.global_batch_size')} is not a multiple of the {dp_size} data-parallel ranks of the {role} "
                f"({_shared_ranks(config.role(role))}). {fix}"
            )


def _shared_ranks(settings: RoleSettings) -> str:
    """The division that makes the data-parallel size."""
    further = "".join(
        f" / {what} size {size}"
        for what, size in (("context-parallel", settings.cp_size), ("pipeline-parallel", settings.pp_size))
        if size > 1
    )
    return f"{settings.num_ranks} ranks / tensor-parallel size {settings.tp_size}{further}"


def _check_micro_batch(checked: Checked) -> None:
    batch = checked.config.batch
    if batch.use_dynamic_batch_size and batch.max_tokens_per_gpu is None:
        raise ConfigError(
            f"{checked.cite('batch.use_dynamic_batch_size')} needs --max-tokens-per-gpu: the tokens that one micro-batch of a rank "
            f"may hold. The longest sample has {checked.config.max_sample_tokens}"
        )
    if batch.max_tokens_per_gpu is not None and not batch.use_dynamic_batch_size:
        raise ConfigError(
            f"{checked.cite('batch.max_tokens_per_gpu')} is used only with --use-dynamic-batch-size. Add that, or leave it out and "
            "set --micro-batch-size"
        )


def _check_schedule(checked: Checked) -> None:
    config = checked.config
    if config.ppo.num_critic_only_steps > config.run.num_rollout:
        raise ConfigError(
            f"{checked.cite('ppo.num_critic_only_steps')} is more than the run's {checked.cite('run.num_rollout')}. Lower it, or "
            "raise --num-rollout"
        )
    for role in config.roles:
        settings = config.role(role)
        prefix = "critic-" if role == "critic" else ""
        if settings.min_lr > settings.lr:
            raise ConfigError(
                f"{checked.cite('optimizer.min_lr')} is above the {role}'s peak learning rate {shown(settings.lr)} (--{prefix}lr). "
                "Lower --min-lr"
            )
        decays = settings.lr_decay_style != "constant" and settings.planned_steps > 0
        if decays and settings.lr_warmup_iters >= settings.lr_decay_iters:
            raise ConfigError(
                f"the {role}'s warm-up of {settings.lr_warmup_iters} steps leaves nothing of the {settings.lr_decay_iters} steps "
                f"of {checked.cite('optimizer.lr_decay_style')} decay (--lr-decay-iters; default: all planned steps). Lower "
                f"--{prefix}lr-warmup-iters or raise --lr-decay-iters"
            )


def _check_weight_bucket(checked: Checked) -> None:
    cluster, bucket = checked.config.cluster, checked.config.rollout.weight_bucket_bytes
    # a bucket on its way and the rollout's columns must fit together; a cluster that is joined has its own store
    starts_cluster = cluster.launcher != "local" and cluster.ray_address in (None, "local")
    if starts_cluster and bucket > cluster.object_store_bytes // 2:
        raise ConfigError(
            f"{checked.cite('rollout.weight_bucket_bytes')} is more than half of {checked.cite('cluster.object_store_bytes')}. Use "
            f"--weight-bucket-bytes {cluster.object_store_bytes // 2} or less, or --object-store-bytes {2 * bucket} or more"
        )


def _check_eval(checked: Checked) -> None:
    settings = checked.config.eval
    if settings.eval_n_samples_per_prompt > 1 and settings.eval_temperature == 0:
        raise ConfigError(
            f"{checked.cite('eval.eval_n_samples_per_prompt')} with {checked.cite('eval.eval_temperature')}: greedy answers to one "
            "prompt are all the same. Set an --eval-temperature above 0, or ask for one answer"
        )
    if settings.eval_interval > 0 and settings.eval_prompt_data is None:
        raise ConfigError(
            f"{checked.cite('eval.eval_interval')} needs --eval-prompt-data: a file of held-out prompts. Give one, or set "
            "--eval-interval 0"
        )


def _check_load(checked: Checked) -> None:
    settings = checked.config.checkpoint
    if settings.load is not None and not checked.config.trains:
        raise ConfigError(
            f"{checked.cite('checkpoint.load')} with --debug-rollout-only: nothing is trained, so there is nothing to go on from. "
            "Generate with the weights of --hf-checkpoint"
        )
    if settings.ckpt_step is not None and settings.load is None:
        raise ConfigError(f"{checked.cite('checkpoint.ckpt_step')} needs --load RUN: the run folder whose checkpoint it is")
