"""The command line of a server, and the check of flags that users pass on."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from slime_ppo.errors import ConfigError
from slime_ppo.rollout.sglang.installed_flags import installed_flags
from slime_ppo.rollout.sglang.refused_flags import OURS, REFUSED, REFUSED_PREFIXES
from slime_ppo.rollout.sglang.server_args import ServerSpec, check_server_args, server_command, server_environment

SPEC = ServerSpec(hf_folder="/model", dtype="bfloat16", device="cuda", max_positions=100, log_file="log", api_key="secret")

COMPARE = """
import argparse
from slime_ppo.rollout.sglang import stand_ins
stand_ins.install_torchvision()
stand_ins.install_sgl_kernel()
from sglang.srt.server_args import ServerArgs
from slime_ppo.rollout.sglang.installed_flags import installed_flags
parser = argparse.ArgumentParser(add_help=False)
ServerArgs.add_cli_args(parser)
real = {name.lstrip('-').replace('-', '_'): action for action in parser._actions for name in action.option_strings}
ours = installed_flags()
assert set(real) == set(ours), set(real) ^ set(ours)
for name, action in real.items():
    flag = ours[name]
    assert (action.nargs == 0) == (flag.kind == 'switch'), name
    assert flag.kind not in ('int', 'float') or action.type is {'int': int, 'float': float}[flag.kind], name
    assert name.startswith('lora_') or flag.is_list == (action.nargs in ('+', '*')), name
    assert not flag.choices or set(map(str, action.choices)) == set(flag.choices), name
    assert name == 'monokernel_backend' or action.dest == flag.field, name
print('equal', len(real))
"""


def _value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_command_on_a_gpu_has_what_turns_and_sync_need_and_no_key() -> None:
    command = server_command(replace(SPEC, tp_size=2, deterministic=True, fp32_lm_head=True, random_seed=7), 1234)
    assert command[1:3] == ["-m", "slime_ppo.rollout.sglang.serve"] and command[3] == str(os.getpid())
    expected = {"--port": "1234", "--tp-size": "2", "--context-length": "103", "--dtype": "bfloat16", "--random-seed": "7"}
    assert {flag: _value(command, flag) for flag in expected} == expected
    switches = {"--enable-memory-saver", "--sleep-on-idle", "--enable-deterministic-inference", "--enable-fp32-lm-head"}
    assert switches <= set(command) and not {"--is-embedding", "--trust-remote-code", "--attention-backend"} & set(command)
    assert "secret" not in " ".join(command) and "secret" not in repr(SPEC)
    assert server_environment(replace(SPEC, gpu_ids=(2, 3)))["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert pickle.loads(pickle.dumps(SPEC)) == SPEC


def test_command_on_a_cpu_uses_torch_and_the_given_cache_and_threads() -> None:
    spec = replace(SPEC, device="cpu", kv_tokens=500, num_threads=3, tp_size=2, is_reward_model=True)
    command, environment = server_command(spec, 1), server_environment(spec)
    assert (_value(command, "--attention-backend"), _value(command, "--max-total-tokens")) == ("torch_batched", "500")
    assert "--is-embedding" in command and "--enable-memory-saver" not in command
    assert environment["OMP_NUM_THREADS"] == "3" and environment["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_command_on_a_cpu_with_seeds_keeps_the_attention_whose_numbers_do_not_depend_on_the_batch() -> None:
    assert _value(server_command(replace(SPEC, device="cpu", deterministic=True), 1), "--attention-backend") == "torch_native"


def test_command_on_a_cpu_has_the_attention_of_sglang_where_the_user_says_so() -> None:
    own = (("attention_backend", ("torch_native",)),)
    check_server_args(own, "--sglang")
    command = server_command(replace(SPEC, device="cpu", extra=own), 1)
    assert command[-2:] == ["--attention-backend", "torch_native"]


def test_environment_turns_the_compiler_off_on_a_cpu_unless_it_is_asked_for() -> None:
    spec = replace(SPEC, device="cpu")
    assert server_environment(spec)["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in server_environment(replace(spec, extra=(("enable-torch-compile", None),)))
    assert "TORCH_COMPILE_DISABLE" not in server_environment(SPEC)


def test_command_flags_of_the_user_come_last_and_so_win() -> None:
    command = server_command(replace(SPEC, extra=(("log_level", ("info",)), ("disable-radix-cache", ()), ("a", ("1", "2")))), 1)
    assert command[-6:] == ["--log-level", "info", "--disable-radix-cache", "--a", "1", "2"]
    assert command.index("--log-level") < len(command) - 6


def test_every_flag_of_ours_is_one_of_sglang_and_refused_to_users() -> None:
    known = installed_flags()
    for device in ("cpu", "cuda"):
        command = server_command(replace(SPEC, device=device, kv_tokens=9), 1)  # type: ignore[arg-type]
        assert {word[2:].replace("-", "_") for word in command if word.startswith("--")} <= set(known)
    fields = {flag.field for flag in known.values()}
    assert set(OURS) | set(REFUSED) <= fields and not set(OURS) & set(REFUSED)
    assert all(any(field.startswith(prefix) for field in fields) for prefix in REFUSED_PREFIXES)


def test_flags_read_from_the_source_are_those_of_the_real_server_args() -> None:
    done = subprocess.run([sys.executable, "-c", COMPARE], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 500


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("max-runing-requests", ("4",), "is not a flag of the installed SGLang; did you mean --max-running-requests"),
        ("model-path", ("x",), "it is --hf-checkpoint"),
        ("model", ("x",), "it is --hf-checkpoint"),
        ("tensor-parallel-size", ("2",), "set by slime_ppo"),
        ("preferred_sampling_params", ("{}",), "the trainer can't reproduce"),
        ("speculative-algorithm", ("NGRAM",), "drafted tokens"),
        ("quantization", ("fp8",), "quantised"),
        ("enable-custom-logit-processor", (), "runs code"),
        ("enable-hicache", (), "outlive the flush"),
        ("config", ("x.yaml",), "one by one"),
        ("max-running-requests", ("many",), r"takes a number \(int\), found 'many'"),
        ("max-running-requests", (), "needs a value"),
        ("disable-radix-cache", ("true",), "is a switch and takes no value"),
        ("max-running-requests", ("4", "5"), "takes one value, found '4' '5'"),
        ("cuda-graph-bs-decode", ("1", "two"), r"takes a number \(int\), found 'two'"),
        ("schedule-policy", ("fastest",), "takes one of .*lpm.*; found 'fastest'"),
    ],
)
def test_check_server_args_refuses_with_the_reason(name: str, values: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^run.yaml:7: --.*{words}"):
        check_server_args([("watchdog_timeout", ("60",)), (name, values)], "run.yaml:7")


def test_check_server_args_admits_what_is_left() -> None:
    one = [("mem-fraction-static", ("0.5",)), ("attention_backend", ("triton",)), ("log-level", ("info",))]
    check_server_args([*one, ("disable-radix-cache", ()), ("cuda-graph-bs-decode", ("1", "2", "4"))], "--sglang")


@pytest.mark.parametrize(
    ("host", "key", "words"),
    [("10.0.0.5", None, "10.0.0.5 needs --sglang-api-key-file"), ("0.0.0.0", "k", "no address to call"), ("::1", "k", "IPv6")],
)
def test_host_that_strangers_reach_needs_a_key(host: str, key: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(SPEC, host=host, api_key=key)
    assert replace(SPEC, host="10.0.0.5", api_key="k").host == "10.0.0.5"
