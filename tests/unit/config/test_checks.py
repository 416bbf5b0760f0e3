"""Every combination that is refused, with the parts its message must have."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from slime_ppo.config.checks import check_config, check_engine_support, check_model_shape, config_warnings
from slime_ppo.config.fields import Value
from slime_ppo.config.model_shape import ModelShape, MoeShape
from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config
from slime_ppo.errors import ConfigError
from tests.helpers.configs import make_config, write_model_folder

KL_LOSS: dict[str, Value] = {"ppo__use_kl_loss": True, "ppo__kl_loss_coef": 0.1}
ADAPTIVE: dict[str, Value] = {"ppo__kl_controller": "adaptive", "ppo__kl_target": 6.0, "ppo__kl_horizon": 1000, "ppo__kl_coef": 0.1}

GRPO: dict[str, Value] = {
    "ppo__advantage_estimator": "grpo", "rollout__n_samples_per_prompt": 4, "rollout__rollout_batch_size": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"run__num_rollout": 0}, ("config: run.num_rollout is 0, expected a whole number >= 1",)),
        ({"reward__rm_type": None}, ("no reward", "--custom-rm-path package.module.function")),
        ({"rollout__rollout_top_k": 1}, ("--rollout-top-k 1", "support of one token", "gradient is exactly 0")),
        ({"rollout__rollout_min_p": 1.0}, ("rollout.rollout_min_p is 1.0", ">= 0 and < 1", "the likeliest token alone")),
        (
            {"parallel__pipeline_model_parallel_size": 2},
            ("has 1 ranks", "--pipeline-model-parallel-size 2 does not divide", "Use 1"),
        ),
        ({"parallel__num_virtual_stages_per_pipeline_rank": 2}, ("per-pipeline-rank 2", "needs a pipeline")),
        (
            # inherited from the actor: there is no option of the critic's to leave out
            {
                "parallel__actor_num_gpus_per_node": 2,
                "parallel__pipeline_model_parallel_size": 2,
                "parallel__num_virtual_stages_per_pipeline_rank": 2,
                "critic__pipeline_model_parallel_size": 1,
            },
            (
                "--critic-num-virtual-stages-per-pipeline-rank 2 of the critic",
                "or use --critic-num-virtual-stages-per-pipeline-rank 1",
            ),
        ),
        (
            {"parallel__context_parallel_size": 2},
            ("the actor has 1 ranks", "--context-parallel-size 2 does not divide", "Use 1, or 2 ranks"),
        ),
        (
            {
                "parallel__actor_num_gpus_per_node": 6,
                "parallel__tensor_model_parallel_size": 2,
                "parallel__context_parallel_size": 2,
            },
            ("the actor has 6 ranks", "--tensor-model-parallel-size 2 x --context-parallel-size 2 = 4", "or 8 ranks"),
        ),
        (
            {"parallel__actor_num_gpus_per_node": 2, "critic__context_parallel_size": 4},
            ("the critic has 2 ranks", "--critic-context-parallel-size 4 does not divide", "Use 1 or 2, or 4 ranks"),
        ),
        (
            {"batch__global_batch_size": 1, "parallel__actor_num_gpus_per_node": 4, "parallel__context_parallel_size": 2},
            ("not a multiple of the 2 data-parallel ranks", "4 ranks / tensor-parallel size 1 / context-parallel size 2"),
        ),
        ({"parallel__expert_model_parallel_size": 2}, ("has 1 ranks", "--expert-model-parallel-size 2 does not divide")),
        ({"parallel__expert_tensor_parallel_size": 2}, ("has 1 ranks", "--expert-tensor-parallel-size 2 does not divide", "Use 1")),
        (
            {"parallel__actor_num_gpus_per_node": 3, "parallel__tensor_model_parallel_size": 2},
            ("the actor has 3 ranks", "--tensor-model-parallel-size 2 does not divide", "Use 1 or 3, or 4 ranks"),
        ),
        (
            {
                "parallel__actor_num_nodes": 2,
                "parallel__actor_num_gpus_per_node": 6,
                "parallel__tensor_model_parallel_size": 4,
                "critic__tensor_model_parallel_size": 3,
            },
            (
                "--tensor-model-parallel-size 4 does not divide the 6 ranks of the actor on each of 2",
                "Use 1 or 2, or a multiple of 4",
            ),
        ),
        (
            {"parallel__actor_num_nodes": 2, "critic__tensor_model_parallel_size": 2},
            ("--critic-tensor-model-parallel-size 2 does not divide the 1 ranks of the critic", "(--critic-num-gpus-per-node)"),
        ),
        (
            {"parallel__actor_num_gpus_per_node": 2, "parallel__tensor_model_parallel_size": 2, "critic__num_gpus_per_node": 1},
            ("the critic has 1 ranks", "--critic-tensor-model-parallel-size 2 does not divide", "Use 1, or 2 ranks"),
        ),
        (
            {
                "parallel__actor_num_gpus_per_node": 2,
                "parallel__tensor_model_parallel_size": 2,
                "parallel__sequence_parallel": False,
            },
            ("--no-sequence-parallel", "tensor-parallel size 2", "not in this version"),
        ),
        ({"parallel__sequence_parallel": True}, ("--sequence-parallel", "nothing to split")),
        (
            {**GRPO, "parallel__sequence_parallel": True, "critic__tensor_model_parallel_size": 2, "critic__num_gpus_per_node": 2},
            ("--sequence-parallel", "nothing to split"),
        ),
        (
            {"batch__global_batch_size": 100},
            ("--global-batch-size 100", "does not divide the 128 samples", "Use --global-batch-size 64 or 128"),
        ),
        ({"batch__global_batch_size": 256}, ("does not divide the 128 samples", "Use --global-batch-size 128")),
        (
            {
                "batch__global_batch_size": 3,
                "rollout__rollout_batch_size": 12,
                "parallel__actor_num_gpus_per_node": 2,
                "critic__num_gpus_per_node": 3,
            },
            ("not a multiple of the 2 data-parallel ranks of the actor", "Use --global-batch-size 6"),
        ),
        (
            {"batch__global_batch_size": 1, "parallel__actor_num_gpus_per_node": 2},
            ("--global-batch-size 1 is not a multiple of the 2 data-parallel ranks of the actor", "Use --global-batch-size 2"),
        ),
        (
            {"batch__global_batch_size": 2, "critic__num_gpus_per_node": 4},
            ("multiple of the 4 data-parallel ranks of the critic", "Use --global-batch-size 4"),
        ),
        (
            {"rollout__rollout_batch_size": 3, "batch__global_batch_size": 3, "parallel__actor_num_gpus_per_node": 2},
            ("multiple of the 2 data-parallel ranks", "Make the rollout a multiple of 2 samples"),
        ),
        ({"batch__use_dynamic_batch_size": True}, ("--use-dynamic-batch-size needs --max-tokens-per-gpu", "1040")),
        ({"batch__max_tokens_per_gpu": 4096}, ("--max-tokens-per-gpu 4096 is used only with --use-dynamic-batch-size",)),
        ({"ppo__loss_reduction": "seq-mean-token-sum-norm"}, ("needs --loss-length-norm",)),
        ({"ppo__loss_length_norm": 5.0}, ("--loss-length-norm 5.0 is used only with --loss-reduction seq-mean-token-sum-norm",)),
        ({"ppo__kl_early_stop": 0.1}, ("--kl-early-stop 0.1 with one optimizer step per rollout",)),
        ({"ppo__kl_loss_coef": 0.1}, ("--kl-loss-coef 0.1 is used only with --use-kl-loss",)),
        ({"ppo__use_kl_loss": True}, ("--use-kl-loss with --kl-loss-coef 0 adds nothing",)),
        ({**KL_LOSS, "ppo__kl_loss_type": "k1"}, ("--kl-loss-type k1", "gradient of exactly zero", "Use k2")),
        ({**KL_LOSS, "ppo__kl_coef": 0.1}, ("--kl-coef 0.1", "--use-kl-loss", "--allow-double-kl")),
        ({"ppo__kl_target": 6.0}, ("--kl-target 6.0 is used only with --kl-controller adaptive",)),
        ({"ppo__kl_target_unit": "token"}, ("--kl-target-unit token is used only with --kl-controller adaptive",)),
        ({"ppo__kl_loss_type": "k2"}, ("--kl-loss-type k2 is used only with --use-kl-loss",)),
        ({"run__seed": 2**63}, ("run.seed is 9223372036854775808", "< 9223372036854775808")),
        ({"run__seed": 10**400}, ("expected a whole number >= 0 and < 9223372036854775808",)),
        (
            {"rollout__weight_bucket_bytes": 2**29},
            (
                "--weight-bucket-bytes 536870912 is more than half of --object-store-bytes 268435456",
                "Use --weight-bucket-bytes 134217728 or less, or --object-store-bytes 1073741824 or more",
            ),
        ),
        (
            {"rollout__weight_bucket_bytes": 2**29, "cluster__ray_address": "local"},
            ("--weight-bucket-bytes 536870912 is more than half",),
        ),
        ({"ppo__kl_horizon": 10}, ("--kl-horizon 10 is used only with --kl-controller adaptive",)),
        (
            {**ADAPTIVE, "ppo__kl_target": None},
            ("needs --kl-target and --kl-horizon", "found --kl-target not set and --kl-horizon 1"),
        ),
        ({**ADAPTIVE, "ppo__kl_horizon": None}, ("needs --kl-target and --kl-horizon", "--kl-horizon not set")),
        ({**ADAPTIVE, "ppo__kl_coef": 0.0}, ("must start above 0", "--kl-coef 0.0")),
        ({**ADAPTIVE, **KL_LOSS, "ppo__allow_double_kl": True}, ("--kl-controller adaptive", "refused with --use-kl-loss")),
        ({"ppo__num_critic_only_steps": 26}, ("--num-critic-only-steps 26 is more than the run's --num-rollout 25",)),
        ({"optimizer__min_lr": 1e-3}, ("--min-lr 0.001 is above the actor's peak learning rate 1e-06 (--lr)",)),
        ({"optimizer__min_lr": 1e-7, "critic__lr": 1e-8}, ("above the critic's peak learning rate 1e-08 (--critic-lr)",)),
        (
            {"optimizer__lr_decay_style": "cosine", "optimizer__lr_warmup_iters": 25},
            ("the actor's warm-up of 25 steps leaves nothing of the 25 steps", "--lr-decay-style cosine"),
        ),
        (
            {"optimizer__lr_decay_style": "linear", "critic__lr_warmup_iters": 30},
            ("the critic's warm-up of 30 steps", "Lower --critic-lr-warmup-iters"),
        ),
        ({"eval__eval_interval": 5}, ("--eval-interval 5 needs --eval-prompt-data",)),
    ],
)
def test_check_config_refuses_with_reason_and_fix(values: dict[str, Value], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(make_config(**values))
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"reward__rm_type": None, "reward__custom_rm_path": "package.module.function"},
        {"rollout__rollout_top_k": -1},
        {"rollout__rollout_min_p": 0.05},
        # ranks and rates of a critic that is not there
        {**GRPO, "critic__num_gpus_per_node": 3, "critic__tensor_model_parallel_size": 2},
        {**GRPO, "optimizer__min_lr": 1e-7, "critic__lr": 1e-8},
        {"parallel__actor_num_gpus_per_node": 2, "parallel__tensor_model_parallel_size": 2},
        {"parallel__actor_num_gpus_per_node": 2, "parallel__context_parallel_size": 2},
        {"parallel__actor_num_gpus_per_node": 2, "critic__context_parallel_size": 2},
        {"parallel__actor_num_gpus_per_node": 2, "parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True},
        {"parallel__actor_num_gpus_per_node": 2, "critic__num_gpus_per_node": 1},
        {"batch__use_dynamic_batch_size": True, "batch__max_tokens_per_gpu": 10},
        {"ppo__loss_reduction": "seq-mean-token-sum-norm", "ppo__loss_length_norm": 16.0},
        {"ppo__kl_early_stop": 0.1, "ppo__num_epochs_per_rollout": 2},
        {**KL_LOSS, "ppo__kl_coef": 0.1, "ppo__allow_double_kl": True},
        {**KL_LOSS, "ppo__kl_loss_type": "low_var_kl"},
        ADAPTIVE,
        {"ppo__num_critic_only_steps": 25, "optimizer__lr_decay_style": "cosine"},
        {"optimizer__lr_decay_style": "cosine", "optimizer__lr_warmup_iters": 24},
        {"optimizer__lr_warmup_iters": 100},
        {"run__seed": 2**63 - 1},
        {"rollout__weight_bucket_bytes": 2**27},
        {"rollout__weight_bucket_bytes": 2**29, "cluster__ray_address": "10.0.0.1:6379"},
        {"rollout__weight_bucket_bytes": 2**29, "cluster__launcher": "local"},
        {**ADAPTIVE, "ppo__kl_target_unit": "token"},
        {"eval__eval_interval": 5, "eval__eval_prompt_data": "held_out.jsonl"},
    ],
)
def test_check_config_accepts_what_can_run(values: dict[str, Value]) -> None:
    check_config(make_config(**values))


def test_check_config_with_origins_cites_where_a_number_came_from() -> None:
    config = make_config(batch__global_batch_size=100)
    origins = dict.fromkeys(config.values(), "default") | {"batch.global_batch_size": "a.yaml:3"}
    with pytest.raises(ConfigError, match=r"--global-batch-size 100 \(a.yaml:3\)"):
        check_config(config, origins=origins)


@pytest.mark.parametrize(
    ("values", "cited"),
    [
        ({"rollout__rollout_top_p": 0.9}, "--rollout-top-p 0.9"),
        ({"rollout__rollout_top_k": 8}, "--rollout-top-k 8"),
        ({"rollout__rollout_min_p": 0.1, "rollout__rollout_top_k": 8}, "--rollout-top-k 8 and --rollout-min-p 0.1"),
    ],
)
def test_check_engine_support_with_a_restricted_sampler_needs_the_support(values: dict[str, Value], cited: str) -> None:
    config = make_config(**values)
    check_engine_support(config, returns_support=True)
    with pytest.raises(ConfigError, match=f"restricted by {cited}, but .* does not return the support of each token"):
        check_engine_support(config, returns_support=False)


def test_check_engine_support_with_the_whole_vocabulary_needs_none() -> None:
    check_engine_support(make_config(), returns_support=False)


def _shape(folder: Path) -> ModelShape:
    return ModelShape.from_hf_folder(write_model_folder(folder))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_attention_heads": 6}, ("does not divide the 6 attention heads of model", "Use 1 or 2")),
        ({"num_query_groups": 2}, ("does not divide the 2 key-value heads", "Use 1 or 2")),
        ({"ffn_hidden_size": 341}, ("does not divide the 341 FFN columns", "Use 1")),
    ],
)
@pytest.mark.parametrize(("role", "flag"), [("actor", "--tensor-model"), ("critic", "--critic-tensor-model")])
def test_check_model_shape_refuses_tp_that_does_not_divide(
    tmp_path: Path, changes: dict[str, int], parts: tuple[str, ...], role: RoleName, flag: str
) -> None:
    shape = replace(_shape(tmp_path), num_attention_heads=8, num_query_groups=4)
    config = make_config(
        parallel__actor_num_gpus_per_node=4, parallel__tensor_model_parallel_size=4, data__rollout_max_prompt_len=32
    )
    check_model_shape(config, shape, role)
    with pytest.raises(ConfigError) as caught:
        check_model_shape(config, replace(shape, **changes), role)
    assert str(caught.value).startswith(f"{flag}-parallel-size 4 of the {role}")
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


MOE = MoeShape(num_experts=8, top_k=2, ffn_hidden_size=88, norm_topk_prob=True)


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(
    ("moe", "megatron", "values", "parts"),
    [
        (None, "0.16.1", {"expert_model_parallel_size": 2}, ("expert-model-parallel-size 2 of the", "model has 0 experts")),
        (None, "0.16.1", {"expert_tensor_parallel_size": 4}, ("expert-tensor-parallel-size 4 of the", "model has 0 experts")),
        (
            replace(MOE, num_experts=6),
            "0.16.1",
            {"expert_model_parallel_size": 4},
            ("expert-model-parallel-size 4 of the", "does not divide the 6 experts of model. Use 1 or 2 or 3"),
        ),
        (
            replace(MOE, ffn_hidden_size=90),
            "0.16.1",
            {"expert_tensor_parallel_size": 4, "tensor_model_parallel_size": 4},
            ("expert-tensor-parallel-size 4 of the", "does not divide the 90 FFN columns of an expert of model. Use 1 or 2 or 3"),
        ),
        *(
            (
                MOE,
                megatron,
                {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": etp_size},
                (
                    f"expert-tensor-parallel-size {etp_size} of the",
                    "tensor-model-parallel-size 2 while",
                    f"megatron-core {megatron} sums the gradients of experts over the wrong ranks",
                    "expert-model-parallel-size 2 or more, ",
                    "expert-tensor-parallel-size 2 (the default), or megatron-core 0.19 or later",
                ),
            )
            for megatron, etp_size in (("0.16.1", 1), ("0.18.2", 1), ("0.16.1", 4))
        ),
        (MOE, "none", {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, ("megatron-core (not installed here)",)),
    ],
)
def test_check_model_shape_refuses_experts_that_would_not_split_or_train_wrongly(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    moe: MoeShape | None,
    megatron: str,
    values: dict[str, int],
    parts: tuple[str, ...],
    role: RoleName,
) -> None:
    config, shape = _with_experts(tmp_path, monkeypatch, moe, megatron, values)
    with pytest.raises(ConfigError) as caught:
        check_model_shape(config, shape, role)
    assert str(caught.value).startswith("--critic-expert" if role == "critic" else "--expert")
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("moe", "megatron", "values"),
    [
        (None, "0.16.1", {"tensor_model_parallel_size": 2}),
        (MOE, "0.16.1", {"expert_model_parallel_size": 4}),
        (MOE, "0.16.1", {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
        (MOE, "0.16.1", {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2}),
        (MOE, "0.19.0", {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
        (MOE, "1.0.0rc1", {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    ],
)
def test_check_model_shape_accepts_experts_that_train_rightly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, moe: MoeShape | None, megatron: str, values: dict[str, int]
) -> None:
    config, shape = _with_experts(tmp_path, monkeypatch, moe, megatron, values)
    check_model_shape(config, shape)


def _with_experts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, moe: MoeShape | None, megatron: str, values: dict[str, int]
) -> tuple[Config, ModelShape]:
    """Four ranks under a version of megatron-core; an MLP that tensor parallelism would not split is not in a mixture."""

    def version(_: str) -> str:
        if megatron == "none":
            raise PackageNotFoundError
        return megatron

    monkeypatch.setattr("slime_ppo.config.layout_checks.version", version)
    sizes: dict[str, Value] = {f"parallel__{name}": value for name, value in values.items()}
    config = make_config(parallel__actor_num_gpus_per_node=4, data__rollout_max_prompt_len=32, **sizes)
    shape = replace(_shape(folder), num_attention_heads=8, num_query_groups=4, moe=moe)
    return config, shape if moe is None else replace(shape, ffn_hidden_size=341)


def test_check_model_shape_refuses_an_aux_loss_without_experts(tmp_path: Path) -> None:
    config, shape = make_config(model__moe_aux_loss_coeff=0.01, data__rollout_max_prompt_len=32), _shape(tmp_path)
    check_model_shape(config, replace(shape, moe=MOE))
    with pytest.raises(ConfigError, match=r"--moe-aux-loss-coeff 0.01 balances experts, but model of the actor has none"):
        check_model_shape(config, shape)


def test_check_model_shape_refuses_samples_beyond_the_positions(tmp_path: Path) -> None:
    shape = _shape(tmp_path)
    check_model_shape(make_config(data__rollout_max_prompt_len=112), shape)
    with pytest.raises(
        ConfigError, match=r"prompt-len 113 \+ --rollout-max-response-len 16 = 129 tokens, .* 128 positions.* by 1 or"
    ):
        check_model_shape(make_config(data__rollout_max_prompt_len=113), shape)


def test_check_model_shape_allows_an_attention_window_that_no_sample_outgrows(tmp_path: Path) -> None:
    shape = replace(_shape(tmp_path), attention_window=64)
    check_model_shape(make_config(data__rollout_max_prompt_len=48), shape)
    with pytest.raises(
        ConfigError,
        match=r"prompt-len 49 \+ --rollout-max-response-len 16 = 65 tokens, .* 64 tokens in its sliding_window, .* by 1 or",
    ):
        check_model_shape(make_config(data__rollout_max_prompt_len=49), shape)


def test_check_model_shape_counts_held_out_responses_only_when_evaluating(tmp_path: Path) -> None:
    shape = _shape(tmp_path)
    values: dict[str, Value] = {"data__rollout_max_prompt_len": 100, "eval__eval_max_response_len": 29}
    check_model_shape(make_config(**values), shape)
    with pytest.raises(ConfigError, match="--eval-max-response-len 29 = 129"):
        check_model_shape(make_config(**values, eval__eval_interval=1), shape)


def test_config_warnings_name_a_reward_kl_that_is_for_comparison() -> None:
    assert config_warnings(make_config(ppo__kl_coef=0.1)) == ()
    [warning] = config_warnings(make_config(ppo__kl_coef=0.1, ppo__kl_reward_type="k3"))
    assert "--kl-reward-type k3" in warning and "comparison only" in warning


def test_config_warnings_name_a_gspo_that_is_not_its_papers() -> None:
    assert config_warnings(make_config(ppo__policy_loss="gspo")) == ()
    assert config_warnings(make_config(ppo__policy_loss="gspo", ppo__loss_reduction="seq-mean-token-mean")) == ()
    [warning] = config_warnings(make_config(ppo__policy_loss="gspo", ppo__loss_reduction="token-mean"))
    assert warning.startswith("--policy-loss gspo with --loss-reduction token-mean: the objective of its paper")


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        ({"ppo__whiten_domain": "step", "ppo__normalize_advantages": False}, "--whiten-domain step has no effect"),
        ({"ppo__kl_reward_type": "k3"}, "--kl-reward-type k3 has no effect: it is used only with --kl-coef above 0"),
        ({"model__ref_load": "other"}, "--ref-load other has no effect: it is used only with --kl-coef above 0 or --use-kl-loss"),
        ({"optimizer__min_lr": 1e-7}, "--min-lr 1e-07 has no effect: it is used only with --lr-decay-style linear or cosine"),
        ({"optimizer__lr_decay_iters": 9}, "--lr-decay-iters 9 has no effect"),
        ({"tracking__wandb_project": "mine"}, "--wandb-project mine has no effect: it is used only with --use-wandb"),
        ({"tracking__wandb_mode": "offline"}, "--wandb-mode offline has no effect: it is used only with --use-wandb"),
        (
            {"optimizer__lr_warmup_iters": 25, "critic__lr_warmup_iters": 0},
            "the actor's warm-up of 25 steps is not over after its 25",
        ),
        ({"critic__lr_warmup_iters": 30}, "the critic's warm-up of 30 steps is not over after its 25 planned steps"),
    ],
)
def test_config_warnings_name_an_option_without_effect_and_the_run_goes_on(values: dict[str, Value], warning: str) -> None:
    check_config(make_config(**values))
    [found] = config_warnings(make_config(**values))
    assert found.startswith(warning)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"ppo__whiten_domain": "step"},
        {"model__ref_load": "other", **KL_LOSS},
        {"optimizer__min_lr": 1e-7, "optimizer__lr_decay_iters": 9, "optimizer__lr_decay_style": "cosine"},
        {"tracking__wandb_project": "mine", "tracking__wandb_mode": "offline", "tracking__use_wandb": True},
        {"optimizer__lr_warmup_iters": 24},
        # the actor never trains: its warm-up is no one's concern
        {"optimizer__lr_warmup_iters": 9, "ppo__num_critic_only_steps": 25},
    ],
)
def test_config_warnings_are_silent_about_options_in_use(values: dict[str, Value]) -> None:
    assert config_warnings(make_config(**values)) == ()
