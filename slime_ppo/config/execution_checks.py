"""How a step is computed: recomputation, overlap and precision that cannot be. Every message names the options and a way out."""

import importlib.util

from slime_ppo.config.checked import Checked
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.roles import RoleSettings
from slime_ppo.config.root import Config
from slime_ppo.errors import ConfigError

_FUSION_EXTENSION = "fused_weight_gradient_mlp_cuda"
RECOMPUTABLE = ("core_attn", "mlp", "layernorm", "moe")


def check_execution(checked: Checked) -> None:
    """Refuse options that Megatron would refuse on the ranks, or that contradict each other. Raises ConfigError."""
    _check_recompute(checked)
    config = checked.config
    if config.parallel.overlap_param_gather and not config.parallel.overlap_grad_reduce:
        raise ConfigError(
            f"{checked.cite('parallel.overlap_param_gather')} needs --overlap-grad-reduce: gathering is started where reducing has "
            "ended. Add that, or leave it out"
        )
    if config.cluster.device != "auto":
        check_execution_on(config, config.cluster.device)


def check_execution_on(config: Config, device: str) -> None:
    """The part that depends on the device, for where `--device auto` is resolved. Raises ConfigError."""
    if config.parallel.gradient_accumulation_fusion and device == "cpu":
        raise ConfigError(
            f"--gradient-accumulation-fusion on a CPU: its kernel ({_FUSION_EXTENSION}, part of apex) is for GPUs only. Leave it "
            "out, or use --device cuda"
        )
    if config.parallel.gradient_accumulation_fusion and importlib.util.find_spec(_FUSION_EXTENSION) is None:
        raise ConfigError(
            f"--gradient-accumulation-fusion: apex's extension {_FUSION_EXTENSION} is not installed in this environment. Leave it "
            "out, or build apex with its C++ and CUDA extensions"
        )
    recompute = config.recompute
    if recompute.recompute_granularity == "selective" and "layernorm" in recompute.modules and device == "cpu":
        raise ConfigError(
            f"--recompute-modules {recompute.recompute_modules} on a CPU: Megatron recomputes a layernorm with transformer-engine "
            f"only, which needs a GPU. Give some of {', '.join(one for one in RECOMPUTABLE if one != 'layernorm')}"
        )


def check_execution_of_model(config: Config, settings: RoleSettings, shape: ModelShape) -> None:
    """Refuse recomputation of what the model's layers do not have, or of more than a stage has. Raises ConfigError."""
    recompute = config.recompute
    absent, present = ("moe", "mlp") if shape.moe is None else ("mlp", "moe")
    if recompute.recompute_granularity == "selective" and absent in recompute.modules:
        raise ConfigError(
            f"--recompute-modules {recompute.recompute_modules}: Megatron would pass over {absent} in silence, the layers of "
            f"{settings.hf_folder} of the {settings.role} have {shape.num_experts} experts. Use {present}"
        )
    if recompute.recompute_granularity != "full" or recompute.recompute_num_layers is None:
        return
    layers, asked = shape.num_layers // (settings.pp_size * settings.vpp_size), recompute.recompute_num_layers
    if recompute.recompute_method == "uniform" and layers % asked:
        works = [size for size in range(1, layers + 1) if not layers % size]
        raise ConfigError(
            f"--recompute-num-layers {asked} does not divide the {layers} layers of each stage of the {settings.role} "
            f"({shape.num_layers} layers / {settings.pp_size * settings.vpp_size} stages), which --recompute-method uniform needs. "
            f"Use {' or '.join(map(str, works))}"
        )
    if asked > layers:
        raise ConfigError(
            f"--recompute-num-layers {asked} is more than the {layers} layers of each stage of the {settings.role} "
            f"({shape.num_layers} layers / {settings.pp_size * settings.vpp_size} stages). Use {layers} or less"
        )


def _check_recompute(checked: Checked) -> None:
    recompute = checked.config.recompute
    granularity = recompute.recompute_granularity
    if granularity == "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if checked.values[f"recompute.{name}"] is None:
                raise ConfigError(
                    f"{checked.cite('recompute.recompute_granularity')} needs --recompute-method uniform or block, and "
                    f"--recompute-num-layers; {checked.cite(f'recompute.{name}')}. For every layer: --recompute-method uniform "
                    "--recompute-num-layers 1"
                )
    else:
        for name in ("recompute_method", "recompute_num_layers"):
            checked.refuse_unless_default(f"recompute.{name}", "--recompute-granularity full")
    if granularity != "selective":
        checked.refuse_unless_default("recompute.recompute_modules", "--recompute-granularity selective")
    unknown = [name for name in recompute.modules if name not in RECOMPUTABLE]
    if unknown:
        raise ConfigError(
            f"{checked.cite('recompute.recompute_modules')}: {', '.join(map(repr, unknown))} cannot be recomputed in this version. "
            f"Give some of {', '.join(RECOMPUTABLE)}, separated by commas without spaces"
        )
