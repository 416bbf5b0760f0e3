"""Recomputation, overlap and fusion that cannot be are refused before a device is used, with the way out."""

from dataclasses import replace
from pathlib import Path

import pytest

from slime_ppo.config.checks import check_config, check_model_shape, config_warnings
from slime_ppo.config.execution_checks import check_execution_on
from slime_ppo.config.fields import Value
from slime_ppo.config.model_shape import ModelShape, MoeShape
from slime_ppo.errors import ConfigError
from slime_ppo.orchestration.worker_settings import worker_settings
from slime_ppo.parallel.worker_settings import ExecutionSettings
from tests.helpers.configs import make_config, write_model_folder

FULL: dict[str, Value] = {
    "recompute__recompute_granularity": "full",
    "recompute__recompute_method": "uniform",
    "recompute__recompute_num_layers": 1,
}
SELECTIVE: dict[str, Value] = {"recompute__recompute_granularity": "selective", "recompute__recompute_modules": "core_attn,mlp"}
FUSION: dict[str, Value] = {"parallel__gradient_accumulation_fusion": True}


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (
            {"recompute__recompute_granularity": "full"},
            ("--recompute-granularity full needs --recompute-method uniform or block", "--recompute-method not set"),
        ),
        (
            FULL | {"recompute__recompute_num_layers": None},
            ("--recompute-granularity full needs", "--recompute-num-layers not set"),
        ),
        (
            {"recompute__recompute_granularity": "selective", "recompute__recompute_method": "block"},
            ("--recompute-method block is used only with --recompute-granularity full",),
        ),
        ({"recompute__recompute_num_layers": 2}, ("--recompute-num-layers 2 is used only with --recompute-granularity full",)),
        (
            FULL | {"recompute__recompute_modules": "mlp"},
            ("--recompute-modules mlp is used only with --recompute-granularity selective",),
        ),
        (
            SELECTIVE | {"recompute__recompute_modules": "mlp,core_attention"},
            ("'core_attention' cannot be", "Give some of core_attn"),
        ),
        (SELECTIVE | {"recompute__recompute_modules": "mlp, moe"}, ("' moe' cannot be recomputed", "without spaces")),
        (
            SELECTIVE | {"recompute__recompute_modules": "mlp,layernorm", "cluster__device": "cpu"},
            ("--recompute-modules mlp,layernorm on a CPU", "transformer-engine", "Give some of core_attn, mlp, moe"),
        ),
        (
            {"parallel__overlap_param_gather": True},
            ("--overlap-param-gather needs --overlap-grad-reduce", "Add that, or leave it out"),
        ),
        (
            FUSION | {"cluster__device": "cpu"},
            ("--gradient-accumulation-fusion on a CPU", "fused_weight_gradient_mlp_cuda", "--device cuda"),
        ),
    ],
)
def test_check_config_execution_that_cannot_be_is_refused(values: dict[str, Value], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(make_config(reward__rm_type="vader", **values))
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        FULL,
        SELECTIVE,
        FUSION,  # auto: refused when the device is known
        {"parallel__overlap_grad_reduce": True, "parallel__overlap_param_gather": True},
    ],
)
def test_check_config_execution_that_can_be_passes(values: dict[str, Value]) -> None:
    check_config(make_config(reward__rm_type="vader", **values))


def test_check_execution_on_refuses_fusion_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(**FUSION)
    with pytest.raises(ConfigError, match="--gradient-accumulation-fusion on a CPU"):
        check_execution_on(config, "cpu")
    with pytest.raises(ConfigError, match="extension fused_weight_gradient_mlp_cuda is not installed"):
        check_execution_on(config, "cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    check_execution_on(config, "cuda")
    assert worker_settings(config, "actor", init_method="file:///x", device="cuda")[0].execution.gradient_accumulation_fusion


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_worker_settings_both_roles_compute_a_step_alike(role: str) -> None:
    values = FULL | {"parallel__overlap_grad_reduce": True, "parallel__overlap_param_gather": True, "model__fp32_lm_head": True}
    [rank] = worker_settings(make_config(**values), role, init_method="file:///x", device="cpu")  # type: ignore[arg-type]
    assert rank.execution == ExecutionSettings("full", "uniform", 1, ("core_attn",), True, True, None)
    assert rank.model.fp32_lm_head
    [rank] = worker_settings(make_config(**SELECTIVE), role, init_method="file:///x", device="cpu")  # type: ignore[arg-type]
    assert rank.execution == ExecutionSettings(recompute_granularity="selective", recompute_modules=("core_attn", "mlp"))


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (
            {"recompute__recompute_num_layers": 3},
            ("--recompute-num-layers 3 does not divide the 4 layers of each stage of the actor", "Use 1 or 2 or 4"),
        ),
        (
            {
                "recompute__recompute_num_layers": 4,
                "parallel__pipeline_model_parallel_size": 2,
                "parallel__actor_num_gpus_per_node": 2,
            },
            ("does not divide the 2 layers", "(4 layers / 2 stages)", "Use 1 or 2"),
        ),
        (
            {"recompute__recompute_num_layers": 5, "recompute__recompute_method": "block"},
            ("--recompute-num-layers 5 is more than the 4 layers of each stage of the actor", "Use 4 or less"),
        ),
    ],
)
def test_check_model_shape_recompute_beyond_a_stage_is_refused(
    tmp_path: Path, values: dict[str, Value], parts: tuple[str, ...]
) -> None:
    shape = ModelShape.from_hf_folder(str(write_model_folder(tmp_path)))
    check_model_shape(make_config(**FULL), replace(shape, max_position_embeddings=10**6))
    with pytest.raises(ConfigError) as caught:
        check_model_shape(make_config(**(FULL | values)), replace(shape, max_position_embeddings=10**6))
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def test_check_model_shape_recompute_of_what_no_layer_has_is_refused(tmp_path: Path) -> None:
    dense = replace(ModelShape.from_hf_folder(str(write_model_folder(tmp_path))), max_position_embeddings=10**6)
    mixture = replace(dense, moe=MoeShape(num_experts=4, top_k=2, ffn_hidden_size=32, norm_topk_prob=True))
    for own, of_the_other, experts in ((dense, mixture, 0), (mixture, dense, 4)):
        names = {0: "mlp", 4: "moe"}
        right = make_config(**(SELECTIVE | {"recompute__recompute_modules": names[experts]}))
        check_model_shape(right, own)
        with pytest.raises(
            ConfigError, match=f"over {names[experts]} in silence.* {4 - experts} experts. Use {names[4 - experts]}"
        ):
            check_model_shape(right, of_the_other)


def test_config_warnings_fp32_lm_head_of_a_float32_model_has_no_effect() -> None:
    [warning] = config_warnings(make_config(model__fp32_lm_head=True))
    assert warning.startswith("--fp32-lm-head has no effect: it is used only with --dtype bfloat16")
    assert config_warnings(make_config(model__fp32_lm_head=True, model__dtype="bfloat16")) == ()
