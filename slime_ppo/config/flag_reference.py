"""Generates configs/README.md: `python -m slime_ppo.config.flag_reference > configs/README.md`."""

import sys

from slime_ppo.config.fields import OptionSpec
from slime_ppo.config.root import OPTION_BY_KEY, OPTIONS, SECTIONS, SFT_OPTIONS, SFT_SECTIONS
from slime_ppo.config.sft import SftConfig

_INTRO = """\
# Options

Generated from the dataclasses in `slime_ppo/config` by `python -m slime_ppo.config.flag_reference > configs/README.md`.

An option is a flag and a key of a section in a YAML file:

```yaml
optimizer:
  lr: 1e-6
critic:
  lr: 1e-5        # --critic-lr
```

- `--config a.yaml b.yaml` are merged left to right, a later file wins over an earlier one, and a flag wins over all files.
- A boolean is `--x` or `--no-x` on the command line, `true` or `false` in YAML. `null` returns an option to its default where
  the table says so.
- Paths, also those in a YAML file, are relative to the current directory.
- An unknown key or flag, a key in the wrong section and a value of the wrong type end the command with exit code 2.
- `--print-config` prints every value and where it came from; `--dry-run` reads and checks all files, and prints batch plan,
  placement, a memory estimate and where the run would start.

Beside this file are `quickstart_cpu.yaml`, which `make quickstart` runs, and recipes for GPUs, which `scripts/run_RECIPE.sh`
submits to a Ray cluster; what each of them needs stands at its head.
"""


def flag_reference() -> str:
    """The text of configs/README.md: one table per section, at the end that of supervised fine-tuning."""
    tables = [_section_table(section, declared) for section, declared in SECTIONS.items()]
    return _INTRO + "".join(tables) + _sft_text() + _section_table("sft", SftConfig)


def _sft_text() -> str:
    """What scripts/train_sft.py takes of the sections above."""
    own = {spec.key for spec in SFT_OPTIONS}
    shared = [f"`{section}`" for section in SFT_SECTIONS if section in SECTIONS]
    without = [f"`{spec.flag}`" for spec in OPTIONS if spec.section in SFT_SECTIONS and spec.key not in own]
    return (
        f"\nThe options above are those of scripts/train_ppo.py. scripts/train_sft.py has the sections {', '.join(shared)}, "
        f"without {', '.join(without)}, and one of its own:\n"
    )


def _section_table(section: str, declared: type) -> str:
    about = (declared.__doc__ or "").splitlines()[0]
    rows = [_row(spec) for spec in OPTION_BY_KEY.values() if spec.section == section]
    return "\n".join(
        [
            f"\n## `{section}`",
            "",
            about,
            "",
            "| key | flag | value | default | unit | meaning |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _row(spec: OptionSpec) -> str:
    flag = f"`{spec.flag}` `{spec.no_flag}`" if spec.kind == "bool" else f"`{spec.flag}`"
    cells = (f"`{spec.name}`", flag, spec.expected, spec.shown_default, spec.unit, spec.help)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(flag_reference())
