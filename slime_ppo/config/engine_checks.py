"""Checks of the rollout engine's options: SGLang's servers, their samplers, and how weights reach them."""

from urllib.parse import urlsplit

from slime_ppo.config.checked import Checked
from slime_ppo.config.rollout import SGLANG_MAX_TOP_K
from slime_ppo.config.root import Config
from slime_ppo.errors import ConfigError

_LOOPBACK = ("127.0.0.1", "localhost")
_SGLANG = "--rollout-engine sglang"


def check_engine(checked: Checked) -> None:
    """Refuse what the rollout engine cannot do. Raises ConfigError."""
    if checked.config.rollout.engine == "embedded":
        _check_embedded(checked)
        return
    _check_engine_sizes(checked)
    _check_servers(checked)
    _check_seeds_and_supports(checked)
    if checked.config.trains and checked.config.generates:
        _check_weight_sync(checked)


def _check_embedded(checked: Checked) -> None:
    for key in ("rollout.rollout_num_gpus", "rollout.rollout_num_gpus_per_engine"):
        checked.refuse_unless_default(key, f"{_SGLANG}; the embedded engine is one process")
    path = checked.config.rollout.weight_sync
    if path not in ("auto", "tensor"):
        raise ConfigError(
            f"{checked.cite('rollout.weight_sync')} is a path to SGLang's servers; the embedded engine gets its weights through "
            f"memory. Use {_SGLANG}, or --weight-sync auto"
        )


def _check_engine_sizes(checked: Checked) -> None:
    rollout, total = checked.config.rollout, checked.config.num_rollout_devices
    if checked.config.sglang.server_urls is not None:
        for key in ("rollout.rollout_num_gpus", "rollout.rollout_num_gpus_per_engine", "sglang.port", "sglang.server_args"):
            if checked.changed(key):
                raise ConfigError(
                    f"{checked.cite(key)} is of servers that the run starts, but {checked.cite('sglang.server_urls')} names "
                    "servers that run already. Leave one of them out"
                )
        return
    if total % rollout.rollout_num_gpus_per_engine:
        raise ConfigError(
            f"{checked.cite('rollout.rollout_num_gpus')} is not a multiple of "
            f"{checked.cite('rollout.rollout_num_gpus_per_engine')}: every engine has as many devices. Use "
            f"{total - total % rollout.rollout_num_gpus_per_engine} or change the engine's size"
        )


def _check_servers(checked: Checked) -> None:
    sglang = checked.config.sglang
    _ = sglang.further_args  # raises for a text that is none
    if sglang.host not in _LOOPBACK and sglang.api_key_file is None and sglang.server_urls is None:
        raise ConfigError(
            f"{checked.cite('sglang.host')} lets other machines reach the servers, which load weights that anybody sends. Give "
            "--sglang-api-key-file, or leave the host out"
        )
    for key, urls in (
        ("sglang.server_urls", server_urls(sglang.server_urls)),
        ("sglang.router_url", server_urls(sglang.router_url)),
    ):
        for url in urls:
            if not _is_address(url):
                raise ConfigError(f"{checked.cite(key)}: {url!r} is no address of a server, expected http://host:port")
    if len(server_urls(sglang.router_url)) > 1:
        raise ConfigError(f"{checked.cite('sglang.router_url')} names more than one router, expected one http://host:port")
    if sglang.router_url is not None and sglang.server_urls is None and sglang.port is None:
        raise ConfigError(
            f"{checked.cite('sglang.router_url')} sends to addresses that it was given, and our own servers take free ports, "
            "others after every restart. Give --sglang-port, or name servers that run already (--sglang-server-urls)"
        )
    if len(set(server_urls(sglang.server_urls))) < len(server_urls(sglang.server_urls)):
        raise ConfigError(f"{checked.cite('sglang.server_urls')} names a server twice")
    samples = checked.config.samples_per_rollout
    if sglang.port is not None and sglang.port + len(checked.config.engine_bundles) - 1 > 65535:
        raise ConfigError(
            f"{checked.cite('sglang.port')} leaves no ports for {len(checked.config.engine_bundles)} servers below 65536"
        )
    if sglang.max_concurrency is not None and sglang.max_concurrency > samples:
        raise ConfigError(
            f"{checked.cite('sglang.max_concurrency')} is more than the {samples} samples of a rollout. Leave it out: all of "
            "them are under way at one time by default"
        )


def _is_address(url: str) -> bool:
    """A user name or password in it would be written to logs; a path would get into those of the calls."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:  # a port that is no number
        return False


def server_urls(text: str | None) -> tuple[str, ...]:
    """The addresses of a comma-separated list, without a slash at the end."""
    return () if text is None else tuple(one.strip().rstrip("/") for one in text.split(","))


def _check_seeds_and_supports(checked: Checked) -> None:
    rollout, evaluation = checked.config.rollout, checked.config.eval
    of_eval = evaluation.restrictions if evaluation.eval_interval > 0 else ()
    for key, given in (
        ("rollout.rollout_top_k", rollout.rollout_top_k),
        ("eval.eval_top_k", evaluation.eval_top_k if "eval_top_k" in of_eval else 0),
    ):
        if given > SGLANG_MAX_TOP_K:
            raise ConfigError(
                f"{checked.cite(key)}: SGLang returns supports of at most {SGLANG_MAX_TOP_K} tokens. Lower it, or use 0 (off)"
            )
    for key, used in (("rollout.rollout_min_p", rollout.rollout_min_p > 0), ("eval.eval_min_p", "eval_min_p" in of_eval)):
        if checked.config.sglang.deterministic and used:
            raise ConfigError(
                f"{checked.cite('sglang.deterministic')} with {checked.cite(key)}: SGLang's sampler has no seeds with min-p. Leave "
                "one of them out"
            )


def _check_weight_sync(checked: Checked) -> None:
    config = checked.config
    path = config.rollout.weight_sync
    if path != "disk":
        checked.refuse_unless_default("rollout.weight_sync_folder", "--weight-sync disk")
    if config.cluster.device == "cuda":
        check_weight_sync_on_gpus(config)


def check_weight_sync_on_gpus(config: Config) -> None:
    """Refuse a way to SGLang's servers that does not exist between GPUs placed like these. Raises ConfigError."""
    path = config.rollout.weight_sync
    if not config.engine_shares_devices:
        if path == "tensor":
            raise ConfigError(
                "--weight-sync tensor hands memory of a GPU to a server on the same GPU, and with --no-colocate or "
                "--sglang-server-urls no server is there. Use --weight-sync distributed or disk"
            )
        return
    if path == "distributed":
        raise ConfigError(
            "--weight-sync distributed with --colocate: NCCL allows one process of a group on each GPU, and actor and servers "
            "share theirs. Use tensor (auto), or disk"
        )
    found, allowed = config.num_rollout_devices, config.role("actor").num_ranks
    if path != "disk" and found > allowed:
        raise ConfigError(
            f"--weight-sync tensor: the engines have {found} GPUs, the actor {allowed}, and each rank of a server reads the "
            "weights of the actor's rank on its GPU. Lower --rollout-num-gpus, or use --weight-sync disk"
        )
