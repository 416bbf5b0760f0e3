"""Options of the rollout engine that contradict each other, as a user types them, and arguments that go on to SGLang's servers."""

from pathlib import Path

import pytest

from slime_ppo.config.api_key import read_api_key
from slime_ppo.config.checks import config_warnings
from slime_ppo.config.cli import parse_config
from slime_ppo.config.root import Config
from slime_ppo.errors import ConfigError

REQUIRED = ("--hf-checkpoint", "model", "--prompt-data", "prompts.jsonl")
SGLANG = (*REQUIRED, "--rollout-engine", "sglang")
SAMPLED_EVAL = ("--eval-interval", "1", "--eval-prompt-data", "heldout.jsonl", "--eval-temperature", "1")


def _config(*flags: str) -> Config:
    return parse_config([*SGLANG, *flags]).config


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*REQUIRED, "--rollout-num-gpus", "2"), "--rollout-num-gpus 2 is used only with --rollout-engine sglang"),
        ((*REQUIRED, "--rollout-num-gpus-per-engine", "2"), "--rollout-num-gpus-per-engine 2 is used only with"),
        ((*REQUIRED, "--weight-sync", "disk"), "--weight-sync disk is a path to SGLang's servers"),
        ((*SGLANG, "--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2"), "--rollout-num-gpus 3 is not a multiple of"),
        ((*SGLANG, "--sglang-host", "0.0.0.0"), "--sglang-host 0.0.0.0 lets other machines reach the servers"),
        ((*SGLANG, "--sglang-server-urls", "localhost:30000"), "'localhost:30000' is no address of a server"),
        ((*SGLANG, "--sglang-server-urls", "http://a:1,http://a:1/"), "names a server twice"),
        (
            (*SGLANG, "--sglang-server-urls", "http://a:1", "--rollout-num-gpus", "2"),
            "--rollout-num-gpus 2 is of servers that the run",
        ),
        (
            (*SGLANG, "--sglang-server-urls", "http://a:1", "--sglang-tp-size", "2"),
            "--sglang-server-args --tp-size 2 is of servers",
        ),
        ((*SGLANG, "--sglang-server-urls", "http://a:port"), "'http://a:port' is no address of a server"),
        ((*SGLANG, "--sglang-server-urls", "http://me:key@a:1"), "is no address of a server"),
        ((*SGLANG, "--sglang-router-url", "router"), "'router' is no address of a server"),
        ((*SGLANG, "--sglang-router-url", "http://a:1,http://b:1"), "names more than one router"),
        ((*SGLANG, "--sglang-router-url", "http://a:1"), "our own servers take free ports, others after every restart"),
        ((*SGLANG, "--sglang-max-concurrency", "129"), "--sglang-max-concurrency 129 is more than the 128 samples"),
        ((*SGLANG, "--sglang-port", "65535", "--rollout-num-gpus", "2"), "--sglang-port 65535 leaves no ports for 2 servers"),
        ((*SGLANG, "--rollout-top-k", "5000"), "--rollout-top-k 5000: SGLang returns supports of at most 4096 tokens"),
        ((*SGLANG, *SAMPLED_EVAL, "--eval-top-k", "5000"), "--eval-top-k 5000: SGLang returns supports of at most 4096 tokens"),
        ((*SGLANG, "--sglang-deterministic", "--rollout-min-p", "0.1"), "--rollout-min-p 0.1: SGLang's sampler has no seeds with"),
        ((*SGLANG, *SAMPLED_EVAL, "--sglang-deterministic", "--eval-min-p", "0.1"), "--eval-min-p 0.1: SGLang's sampler has no"),
        ((*SGLANG, "--weight-sync-folder", "w"), "--weight-sync-folder w is used only with --weight-sync disk"),
        (
            (*SGLANG, "--weight-sync", "tensor", "--device", "cuda", "--no-colocate"),
            "--weight-sync tensor hands memory of a GPU to a server on the same GPU",
        ),
        (
            (*SGLANG, "--weight-sync", "tensor", "--device", "cuda", "--sglang-server-urls", "http://a:1"),
            "--weight-sync tensor hands memory of a GPU to a server on the same GPU",
        ),
        ((*SGLANG, "--weight-sync", "distributed", "--device", "cuda"), "NCCL allows one process of a group on each GPU"),
        ((*SGLANG, "--rollout-num-gpus", "2", "--device", "cuda"), "the engines have 2 GPUs, the actor 1"),
        ((*SGLANG, "--sglang-pause-mode", "in_place"), "expected one of abort, retract"),
        ((*SGLANG, "--sglang-determinstic"), "Did you mean --sglang-deterministic"),
        ((*SGLANG, "--sglang-server-args", "0.6"), "'0.6' belongs to no argument"),
        ((*SGLANG, "--sglang-server-args", "--a 'b"), "No closing quotation"),
        ((*SGLANG, "stray", "--sglang-page-size", "1"), "'stray' belongs to no flag"),
    ],
)
def test_parse_config_engine_options_that_cannot_work_name_the_flag(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(flags)
    assert message in str(caught.value)


def test_parse_config_unknown_sglang_flags_are_arguments_of_the_servers() -> None:
    config = _config("--sglang-mem-fraction-static", "0.7", "--sglang-enable-metrics", "--sglang-page-size=16", "--lr", "1e-5")
    assert config.sglang.server_args == "--mem-fraction-static 0.7 --enable-metrics --page-size=16"
    assert config.sglang.further_args == (("mem_fraction_static", ("0.7",)), ("enable_metrics", ()), ("page_size", ("16",)))
    assert config.optimizer.lr == 1e-5


def test_parse_config_sglang_flags_with_several_values_keep_them_all() -> None:
    config = _config("--sglang-server-args", "--a 1 2 --b", "--sglang-cuda-graph-bs", "1", "2", "4", "--lr", "1e-5")
    assert config.sglang.further_args == (("a", ("1", "2")), ("b", ()), ("cuda_graph_bs", ("1", "2", "4")))


def test_parse_config_server_args_of_flag_and_text_are_joined_and_survive_the_yaml(tmp_path: Path) -> None:
    config = _config("--sglang-server-args", "--a 1", "--sglang-b", "two words", "--sglang-c", "-1")
    assert config.sglang.further_args == (("a", ("1",)), ("b", ("two words",)), ("c", ("-1",)))
    (tmp_path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert parse_config(["--config", str(tmp_path / "config.yaml")]).config == config


def test_parse_config_server_args_of_flags_are_added_to_those_of_the_yaml(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("sglang:\n  server_args: --page-size 1\n", encoding="utf-8")
    added = _config("--config", str(path), "--sglang-enable-metrics")
    assert added.sglang.further_args == (("page_size", ("1",)), ("enable_metrics", ()))
    replaced = _config("--config", str(path), "--sglang-server-args", "--a 1", "--sglang-enable-metrics")
    assert replaced.sglang.further_args == (("a", ("1",)), ("enable_metrics", ()))


def test_top_k_that_sglang_needs_is_set_and_said() -> None:
    assert _config().rollout.sampler_top_k == 0
    assert not any("--rollout-top-k" in line for line in config_warnings(_config()))
    restricted = _config("--rollout-top-p", "0.9")
    assert restricted.rollout.sampler_top_k == 4096
    assert restricted.rollout.restrictions == ("rollout_top_p",)
    assert any("--rollout-top-k 4096 is set" in line for line in config_warnings(restricted))
    assert _config("--rollout-top-p", "0.9", "--rollout-top-k", "256").rollout.sampler_top_k == 256


def test_bundles_of_engines_follow_the_devices() -> None:
    two = ("--actor-num-gpus-per-node", "4", "--rollout-num-gpus-per-engine", "2")
    assert _config(*two).engine_bundles == [range(0, 2), range(2, 4)]
    assert _config(*two, "--rollout-num-gpus", "2").engine_bundles == [range(0, 2)]
    apart = _config(*two, "--no-colocate", "--rollout-num-gpus", "4")
    assert apart.engine_bundles == [range(8, 10), range(10, 12)]
    assert apart.num_bundles == 12
    assert _config("--rollout-num-gpus-per-engine", "2").num_bundles == 2
    urls = _config("--sglang-server-urls", "http://a:1,http://b:1", "--no-colocate")
    assert (urls.engine_bundles, urls.num_rollout_devices) == ([], 0)
    assert urls.num_bundles == 2  # the roles': no device is kept for the servers' client


def test_router_before_servers_whose_addresses_stay_is_taken() -> None:
    for addresses in (("--sglang-port", "30000"), ("--sglang-server-urls", "http://b:1")):
        assert _config("--sglang-router-url", "http://a:1", *addresses).sglang.router_url == "http://a:1"


def test_weight_sync_folder_is_in_the_run_folder_by_default() -> None:
    assert _config("--weight-sync", "disk").weight_sync_folder == "runs/ppo/weight_sync"
    assert _config("--weight-sync", "disk", "--weight-sync-folder", "/shared/w").weight_sync_folder == "/shared/w"


def test_sglang_options_without_the_engine_are_warned_of() -> None:
    config = parse_config([*REQUIRED, "--sglang-deterministic", "--sglang-page-size", "1"]).config
    warned = [line for line in config_warnings(config) if "--rollout-engine sglang" in line]
    assert len(warned) == 2


@pytest.mark.parametrize(
    ("text", "message"), [("", "--key .*found nothing"), ("two keys", "found several"), ("sch\u00fcssel", "found other characters")]
)
def test_api_key_file_that_holds_no_key_raises(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "key"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_api_key(str(path), flag="--key")


def test_api_key_is_read_without_the_line_break(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("secret\n", encoding="utf-8")
    assert (read_api_key(str(path), flag="--key"), read_api_key(None, flag="--key")) == ("secret", None)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_api_key(str(tmp_path / "none"), flag="--key")
