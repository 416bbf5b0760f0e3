"""From the options of a run to the reward function it asked for."""

from slime_ppo.config.api_key import read_api_key
from slime_ppo.config.reward import RewardConfig
from slime_ppo.errors import ConfigError
from slime_ppo.registry import Registry, split_dotted
from slime_ppo.rewards.base import RewardSpec
from slime_ppo.rewards.reward_server import check_listening, inspect_reward_server

REWARD_FUNCTIONS: Registry[str] = Registry(
    "reward function",
    {
        "math": "slime_ppo.rewards.math.MathReward",
        "vader": "slime_ppo.rewards.vader.VaderReward",
        "remote": "slime_ppo.rewards.remote.RemoteReward",
        "reward_model": "slime_ppo.rewards.reward_model.RewardModelReward",
    },
)


def resolve_reward(reward: RewardConfig, *, policy_folder: str, asks_server: bool = True) -> RewardSpec:
    """The reward function that a run asked for; --custom-rm-path ("package.module.function") wins over the name --rm-type.

    The function is not imported here: `RewardRunner.start` does that, in a worker. The server of --rm-url is asked here whether
    it is what the run needs; `policy_folder` holds the tokenizer that a reward model's is compared with. `asks_server` False:
    only the name is looked at, and the spec of a served reward is not one to start a worker with. Raises ConfigError for an
    unknown name (with the known ones and the nearest), for a path of another form, when neither is given, for an unreadable
    key file, and for a server that does not answer or cannot score what this run will send.
    """
    if reward.custom_rm_path is not None:
        origin = "--custom-rm-path"
        split_dotted(reward.custom_rm_path, origin=origin)
        return RewardSpec(reward.custom_rm_path, origin)
    if reward.rm_type is None:
        raise ConfigError(
            f"no reward function: give --rm-type ({', '.join(REWARD_FUNCTIONS.names())}), or --custom-rm-path "
            "package.module.function for your own"
        )
    path = REWARD_FUNCTIONS.resolve(reward.rm_type, origin="--rm-type")
    origin = f"--rm-type {reward.rm_type}"
    if reward.served_by is None:
        return RewardSpec(path, origin)
    if reward.rm_url is None:
        raise ConfigError(f"{origin} needs the address of a server. Add --rm-url")
    if not asks_server:
        return RewardSpec(path, origin)
    return _served(reward, reward.rm_url, policy_folder, RewardSpec(path, origin))


def _served(reward: RewardConfig, url: str, policy_folder: str, spec: RewardSpec) -> RewardSpec:
    """`spec` with what its class needs to ask the server at `url`."""
    api_key = read_api_key(reward.rm_api_key_file, flag="--rm-api-key-file")
    shared = (
        ("url", url),
        ("api_key_file", reward.rm_api_key_file),
        ("timeout_s", reward.request_timeout_s),
        ("max_attempts", reward.rm_max_attempts),
        ("requests_s", reward.requests_s),
    )
    if reward.served_by == "remote":
        check_listening(url)
        return RewardSpec(spec.path, spec.origin, (*shared, ("concurrency", reward.rm_concurrency)))
    server = inspect_reward_server(url, api_key=api_key, sends=reward.rm_input, policy_folder=policy_folder)
    own = (("sends", reward.rm_input), ("max_tokens", server.max_tokens), ("vocab_size", server.vocab_size))
    return RewardSpec(spec.path, spec.origin, (*shared, *own), server.warnings)
