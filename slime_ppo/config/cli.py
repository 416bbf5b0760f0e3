"""The command line: one parser built from the sections, YAML files below it, and where each value came from.

Order, the later wins: default, `--config` files left to right, flags. Everything a user can get wrong here is a ConfigError.
"""

import argparse
import difflib
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from slime_ppo.config.checks import check_config, check_sft_config
from slime_ppo.config.fields import OptionSpec, Value, nearest, shown, yaml_text
from slime_ppo.config.root import OPTION_BY_KEY, OPTIONS, SECTIONS, SFT_OPTIONS, SFT_SECTIONS, Config, Objective, sft_config
from slime_ppo.config.yaml_file import Setting, read_config_file
from slime_ppo.errors import ConfigError, SlimePpoError

_SERVER_PREFIX = "--sglang-"
_SERVER_ARGS = "sglang.server_args"
_SERVER_EPILOG = "--sglang-name value, for a name that is none of ours, goes to SGLang's servers as --name value. "
_GLOBAL_FLAGS = ("--config", "--print-config", "--dry-run", "--help")
_DRY_RUN_HELP = "read and check all files, print batch plan, placement, memory estimate and where the run would start, and exit"


@dataclass(frozen=True)
class CommandLine:
    """What one command takes. `others` are options of another command, with the reason why this one has no use for them."""

    objective: Objective
    description: str
    sections: Mapping[str, type]
    options: tuple[OptionSpec, ...]
    others: tuple[OptionSpec, ...]
    not_here: str


PPO = CommandLine(
    objective="ppo",
    description="Train a language model by PPO: a Megatron actor and critic and a rollout engine, on Ray or torchrun.",
    sections=SECTIONS,
    options=OPTIONS,
    others=tuple(spec for spec in OPTION_BY_KEY.values() if spec.section not in SECTIONS),
    not_here="is for supervised fine-tuning (scripts/train_sft.py)",
)
SFT = CommandLine(
    objective="sft",
    description="Fine-tune a language model on given responses: the Megatron backend of PPO, on Ray or torchrun.",
    sections=SFT_SECTIONS,
    options=SFT_OPTIONS,
    others=tuple(spec for spec in OPTIONS if spec.key not in {own.key for own in SFT_OPTIONS}),
    not_here="is for PPO (scripts/train_ppo.py) and has no meaning in supervised fine-tuning",
)


@dataclass(frozen=True)
class ParsedCommand:
    """A valid config; `origins` maps `section.field` to `default`, `file.yaml:12` or `--flag`."""

    config: Config
    origins: Mapping[str, str]
    print_config: bool
    dry_run: bool


def parse_config(argv: Sequence[str], line: CommandLine = PPO) -> ParsedCommand:
    """Parse flags and files and check the arithmetic; reads the `--config` files and nothing else.

    Raises ConfigError. `--help` prints to stdout and raises SystemExit(0), as argparse does.
    """
    parsed, extras = _parser(line).parse_known_args(list(argv))
    server_args, extras = _server_args(extras) if line.objective == "ppo" else ([], extras)
    if extras:
        raise ConfigError(_unknown_argument(extras[0], line))
    given: dict[str, Any] = vars(parsed)
    files = [path for group in given["config"] or () for path in group]
    settings = [setting for path in files for setting in read_config_file(path, line.options)]
    if server_args:
        of_files = [setting.value for setting in settings if setting.spec.key == _SERVER_ARGS]
        others = given.get(_SERVER_ARGS, of_files[-1] if of_files else None)
        given[_SERVER_ARGS] = f"{others or ''} {shlex.join(server_args)}".strip()
    settings += [_flag_setting(spec, given[spec.key]) for spec in line.options if spec.key in given]
    config, origins = merge_settings(settings, line)
    check = check_config if line.objective == "ppo" else check_sft_config
    check(config, origins=origins)
    return ParsedCommand(config, origins, print_config=given["print_config"], dry_run=given["dry_run"])


def merge_settings(settings: Iterable[Setting], line: CommandLine = PPO) -> tuple[Config, dict[str, str]]:
    """The config and the origin of each value; a later setting wins. ConfigError when a required option is missing."""
    last = {setting.spec.key: setting for setting in settings}
    missing = [spec for spec in line.options if spec.required and spec.key not in last]
    if missing:
        lines = [f"{spec.flag} (or {spec.key} in a --config file): {spec.help}" for spec in missing]
        raise ConfigError("required and not given: " + "; ".join(lines))
    values = {spec.key: last[spec.key].value if spec.key in last else spec.default for spec in line.options}
    origins = {spec.key: last[spec.key].origin if spec.key in last else "default" for spec in line.options}
    sections = {
        section: declared(**{spec.name: values[spec.key] for spec in line.options if spec.section == section})
        for section, declared in line.sections.items()
    }
    return (Config(**sections) if line.objective == "ppo" else sft_config(sections)), origins


def run_cli(argv: Sequence[str], main: Callable[[ParsedCommand], int], line: CommandLine = PPO) -> int:
    """Parse, run `main`, and turn our own errors into `error: ...` on stderr and an exit code: 2 config, 1 the others."""
    try:
        return main(parse_config(argv, line))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except SlimePpoError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def print_config_text(parsed: ParsedCommand) -> str:
    """Every value and its origin, one a line, aligned, by section. It is valid YAML: origins are comments."""
    values, specs = parsed.config.values(), [OPTION_BY_KEY[key] for key in parsed.origins]
    width = max(len(f"  {spec.name}: {_yaml_scalar(values[spec.key])}") for spec in specs)
    lines = []
    for section in dict.fromkeys(spec.section for spec in specs):
        lines.append(f"{section}:")
        for spec in (spec for spec in specs if spec.section == section):
            left = f"  {spec.name}: {_yaml_scalar(values[spec.key])}"
            lines.append(f"{left:<{width}}  # {parsed.origins[spec.key]}")
    return "\n".join(lines) + "\n"


def _yaml_scalar(value: Value) -> str:
    return yaml_text(value).removesuffix("\n").removesuffix("\n...")


class _Parser(argparse.ArgumentParser):
    """argparse that raises our error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}. `--help` lists the flags")


class _Switch(argparse.Action):
    """Stores which of `--x` and `--no-x` was written, as the text true or false."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, "true" if option_string == self.option_strings[0] else "false")


def _parser(line: CommandLine) -> argparse.ArgumentParser:
    parser = _Parser(
        usage="%(prog)s [--config YAML ...] [--flag value ...]",
        description=line.description,
        epilog=(_SERVER_EPILOG if line.objective == "ppo" else "")
        + "Values come from the defaults, then from --config files left to right, then from flags. Paths are relative to "
        "the current directory. In YAML an option is a key of its section: the group it is listed under here.",
        allow_abbrev=False,
        formatter_class=_help_formatter,
    )
    whole = parser.add_argument_group("command")
    whole.add_argument(
        "--config", action="append", nargs="+", metavar="YAML", help="config files; a later one wins over an earlier"
    )
    whole.add_argument("--print-config", action="store_true", help="print every value and where it came from, and exit")
    whole.add_argument("--dry-run", action="store_true", help=_DRY_RUN_HELP)
    for section, declared in line.sections.items():
        group = parser.add_argument_group(section, description=(declared.__doc__ or "").splitlines()[0])
        for spec in (spec for spec in line.options if spec.section == section):
            _add_option(group, spec)
    return parser


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=44, width=132)


def _add_option(group: argparse._ArgumentGroup, spec: OptionSpec) -> None:
    unit = f"; {spec.unit}" if spec.unit else ""
    limits = f"; {spec.bounds}" if str(spec.bounds) else ""
    text = f"{spec.help} [{spec.shown_default}{unit}{limits}]".replace("%", "%%")
    if spec.kind == "bool":
        group.add_argument(spec.flag, spec.no_flag, dest=spec.key, action=_Switch, nargs=0, default=argparse.SUPPRESS, help=text)
        return
    metavar = "{" + ",".join(spec.choices) + "}" if spec.choices else spec.kind.upper()
    group.add_argument(spec.flag, dest=spec.key, default=argparse.SUPPRESS, metavar=metavar, help=text)


def _flag_setting(spec: OptionSpec, text: str) -> Setting:
    origin = spec.no_flag if spec.kind == "bool" and text == "false" else spec.flag
    if spec.optional and text == "null":
        return Setting(spec, None, origin)
    try:
        value = spec.parse(text)
    except ValueError:
        raise ConfigError(spec.refusal(repr(text), origin)) from None
    if not spec.admits(value):
        raise ConfigError(spec.refusal(shown(value) or "empty", origin))
    return Setting(spec, value, origin)


def _server_args(extras: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments for SGLang's servers among those that no option has, and what remains. `--sglang-name value` is their
    `--name value`; one that is close to an option of our own is a mistake in that."""
    own = [spec.flag for spec in OPTIONS if spec.section == "sglang"]
    found: list[str] = []
    remaining: list[str] = []
    for word in extras:
        if word.startswith(_SERVER_PREFIX) and not difflib.get_close_matches(word.split("=", 1)[0], own, n=1, cutoff=0.9):
            found.append("--" + word.removeprefix(_SERVER_PREFIX))
        elif found and not remaining and not word.startswith("--"):
            found.append(word)
        else:
            remaining.append(word)
    return found, remaining


def _unknown_argument(argument: str, line: CommandLine) -> str:
    flag = argument.split("=", 1)[0]
    if not flag.startswith("-"):
        return (
            f"command line: {argument!r} belongs to no flag. A flag takes one value; a boolean takes none: --x for true, "
            f"--no-x for false"
        )
    written = "--" + flag.lstrip("-").replace("_", "-").replace(".", "-")
    flags = _flags(line.options)
    # a YAML key taken for a flag: --shuffle, --no-shuffle or --data.shuffle where the flag is --rollout-shuffle
    keys = {f"--{key}".replace("_", "-").replace(".", "-"): spec.flag for spec in line.options for key in (spec.name, spec.key)}
    keys |= {f"--no-{spec.name}".replace("_", "-"): spec.no_flag for spec in line.options if spec.kind == "bool"}
    near = keys[written] if written in keys and written not in flags else nearest(written, [*flags, *_GLOBAL_FLAGS])
    others = _flags(line.others)
    if written in others:
        hint = f". Did you mean {near}? ({flags[near].help})" if near in flags else ""
        return f"command line: {flag} ({others[written].help}) {line.not_here}{hint}"
    if near in flags:
        return f"command line: unknown flag {flag}. Did you mean {near}? ({flags[near].key}: {flags[near].help})"
    return f"command line: unknown flag {flag}. " + (f"Did you mean {near}?" if near else "`--help` lists the flags")


def _flags(options: Sequence[OptionSpec]) -> dict[str, OptionSpec]:
    """Every flag that sets one of them."""
    return {name: spec for spec in options for name in ((spec.flag, spec.no_flag) if spec.kind == "bool" else (spec.flag,))}
