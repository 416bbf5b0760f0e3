"""What cannot run on the device that `--device auto` has become; refused before anything is started there."""

from slime_ppo.config.engine_checks import check_weight_sync_on_gpus
from slime_ppo.config.execution_checks import check_execution_on
from slime_ppo.config.root import Config
from slime_ppo.config.transformer_impl import check_transformer_impl
from slime_ppo.parallel.worker_settings import DeviceKind


def check_device(config: Config, device: DeviceKind) -> None:
    """Raise ConfigError for an option that the device does not have."""
    check_transformer_impl(config.model, device)
    check_execution_on(config, device)
    if device == "cuda" and config.rollout.engine == "sglang":
        check_weight_sync_on_gpus(config)
