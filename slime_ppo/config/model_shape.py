"""The numbers of a model's shape, read from the config.json of a Hugging Face folder. Only json is used."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slime_ppo.conversion.families import FAMILIES
from slime_ppo.conversion.mapping import ModelFamily, MoeKeys, WindowKey
from slime_ppo.errors import CheckpointError


@dataclass(frozen=True)
class Llama3Scaling:
    """RoPE of Llama 3.1 and later: wavelengths above original positions / low_freq_factor are divided by `factor`, those below
    original positions / high_freq_factor stay, and between the two the frequencies are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class MoeShape:
    """The mixture of experts in every layer: each token goes to `top_k` of them, weighted by their probabilities, which with
    `norm_topk_prob` are those among the `top_k` alone. `ffn_hidden_size` is that of one expert."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    norm_topk_prob: bool


@dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder. `num_query_groups` = key-value heads; `eos_token_ids` may be empty (the tokenizer may know).

    `attention_window`: tokens that a position sees, itself included, when the folder says that attention is windowed.
    `moe` None: every layer has one MLP, of `ffn_hidden_size`, which a mixture of experts does not use.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    attention_window: int | None
    qkv_bias: bool
    qk_layernorm: bool
    rms_norm_eps: float
    eos_token_ids: tuple[int, ...]
    moe: MoeShape | None = None

    @property
    def num_experts(self) -> int:
        """Experts of a layer, 0 of a dense model."""
        return 0 if self.moe is None else self.moe.num_experts

    @property
    def expert_ffn_size(self) -> int:
        """FFN columns of one expert, 0 of a dense model."""
        return 0 if self.moe is None else self.moe.ffn_hidden_size

    @property
    def ffn_size_per_token(self) -> int:
        """FFN columns that a token passes through in a layer: those of all its experts, or of the one MLP."""
        return self.ffn_hidden_size if self.moe is None else self.moe.top_k * self.moe.ffn_hidden_size

    def plain_values(self) -> dict[str, Any]:
        """What two models must have in common, as JSON gives it back. End tokens belong to generation, not to the weights."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        del values["eos_token_ids"]
        return values

    @staticmethod
    def from_hf_folder(path: str | Path) -> "ModelShape":
        """Read `config.json`, and the end tokens from `generation_config.json` when it is there.

        Raises CheckpointError naming the file and key for a missing folder, file or key, a value of the wrong type, a model
        type that is not in this version, and a variant of a family (other biases, another RoPE) that would compute wrongly.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}: no such folder; expected a local Hugging Face folder with config.json and safetensors. Nothing is "
                "downloaded: give the path of a model that is on this machine"
            )
        source = _JsonFile.read(folder / "config.json")
        model_type = source.text("model_type")
        if model_type not in FAMILIES:
            raise CheckpointError(f"{source.path}: model_type {model_type!r} is not in this version; known: {', '.join(FAMILIES)}")
        family = FAMILIES[model_type]
        _refuse_variants(source, family)
        rope = _rope_block(source)
        heads, hidden = source.count("num_attention_heads"), source.count("hidden_size")
        return ModelShape(
            model_type=model_type,
            num_layers=source.count("num_hidden_layers"),
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=source.count("num_key_value_heads") if source.has("num_key_value_heads") else heads,
            head_dim=source.count("head_dim") if source.has("head_dim") else hidden // heads,
            ffn_hidden_size=source.count("intermediate_size"),
            vocab_size=source.count("vocab_size"),
            max_position_embeddings=source.count("max_position_embeddings"),
            tie_word_embeddings=source.flag("tie_word_embeddings"),
            rope_theta=rope.number("rope_theta") if rope.has("rope_theta") else source.number("rope_theta"),
            rope_scaling=_rope_scaling(rope),
            attention_window=_attention_window(source, family),
            qkv_bias=family.qkv_bias,
            qk_layernorm=family.qk_layernorm,
            rms_norm_eps=source.number("rms_norm_eps"),
            eos_token_ids=_eos_token_ids(source),
            moe=None if family.moe_keys is None else _moe_shape(source, family.moe_keys),
        )


def padded_vocab_size(vocab_size: int, *, divisible_by: int, tp_size: int) -> int:
    """The smallest multiple of divisible_by * tp_size that holds the vocabulary (Megatron's rule)."""
    multiple = divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True)
class _JsonFile:
    """A JSON object whose keys are read with their type, and errors that name file and key."""

    path: Path
    entries: dict[str, Any]

    @staticmethod
    def read(path: Path) -> "_JsonFile":
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file; expected a complete Hugging Face folder") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
        if not isinstance(entries, dict):
            raise CheckpointError(f"{path}: holds a {type(entries).__name__}, expected a JSON object")
        return _JsonFile(path, entries)

    def has(self, key: str) -> bool:
        """True when the key is there and not null."""
        return self.entries.get(key) is not None

    def count(self, key: str) -> int:
        """A whole number above 0."""
        value = self._value(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self.path}: {key} is {value!r}, expected a whole number above 0")
        return value

    def number(self, key: str) -> float:
        """A number above 0."""
        value = self._value(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise CheckpointError(f"{self.path}: {key} is {value!r}, expected a number above 0")
        return float(value)

    def text(self, key: str) -> str:
        """A string."""
        value = self._value(key)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.path}: {key} is {value!r}, expected a string")
        return value

    def flag(self, key: str) -> bool:
        """A boolean; absent counts as false, as it does for transformers."""
        value = self._value(key) if self.has(key) else False
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {key} is {value!r}, expected true or false")
        return value

    def block(self, key: str) -> "_JsonFile":
        """A nested object; absent or null counts as empty."""
        value = self.entries.get(key) or {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path}: {key} is {value!r}, expected an object")
        return _JsonFile(self.path, value)

    def _value(self, key: str) -> Any:
        if key not in self.entries:
            raise CheckpointError(f"{self.path}: has no {key!r}, which the model's shape needs")
        return self.entries[key]


def _refuse_variants(source: _JsonFile, family: ModelFamily) -> None:
    """Variants that share the model_type but have other weights or another forward, and keys that must be written out."""
    for key in family.refused_flags:
        if source.flag(key):
            raise CheckpointError(f"{source.path}: {key} true is not in this version, expected false")
    for key in family.required_keys:
        if key not in source.entries:
            raise CheckpointError(f"{source.path}: has no {key!r}, which the shape of a {family.model_type} model needs")
    for key, only in family.fixed_values:
        if source.has(key) and source.entries[key] != only:
            raise CheckpointError(f"{source.path}: {key} is {source.entries[key]!r}, only {only!r} is in this version")
    if source.has("hidden_act") and source.text("hidden_act") != "silu":
        raise CheckpointError(f"{source.path}: hidden_act {source.text('hidden_act')!r} is not in this version, expected 'silu'")


def _rope_block(source: _JsonFile) -> _JsonFile:
    """Parameters of RoPE: transformers 5 writes `rope_parameters`; 4 writes `rope_theta` and, for scaled RoPE, `rope_scaling`."""
    block = source.block("rope_parameters") if source.has("rope_parameters") else source.block("rope_scaling")
    for place in (block, source):
        if place.has("partial_rotary_factor") and place.number("partial_rotary_factor") != 1:
            raise CheckpointError(
                f"{source.path}: partial_rotary_factor {place.number('partial_rotary_factor'):g} is not in this version, expected 1"
            )
    return block


def _rope_scaling(rope: _JsonFile) -> Llama3Scaling | None:
    kind = next((rope.text(key) for key in ("rope_type", "type") if rope.has(key)), "default")  # the first wins in transformers
    if kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointError(f"{rope.path}: RoPE of type {kind!r} is not in this version, expected 'default' or 'llama3'")
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.count("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise CheckpointError(
            f"{rope.path}: RoPE's high_freq_factor is {scaling.high_freq_factor:g}, expected more than its low_freq_factor "
            f"{scaling.low_freq_factor:g}"
        )
    return scaling


def _moe_shape(source: _JsonFile, keys: MoeKeys) -> MoeShape:
    moe = MoeShape(
        num_experts=source.count(next((key for key in keys.num_experts if source.has(key)), keys.num_experts[0])),
        top_k=source.count(keys.top_k),
        ffn_hidden_size=source.count(keys.ffn_hidden_size),
        norm_topk_prob=source.flag(keys.norm_topk_prob),
    )
    if moe.top_k > moe.num_experts:
        raise CheckpointError(f"{source.path}: {keys.top_k} is {moe.top_k}, more than the {moe.num_experts} experts of a layer")
    return moe


def _attention_window(source: _JsonFile, family: ModelFamily) -> int | None:
    """The window when any layer may use one: which layers do is not asked, as sequences longer than it are refused."""
    used = family.window_key is WindowKey.WINDOW or (family.window_key is WindowKey.SWITCH and source.flag("use_sliding_window"))
    return source.count("sliding_window") if used and source.has("sliding_window") else None


def _eos_token_ids(source: _JsonFile) -> tuple[int, ...]:
    generation = source.path.with_name("generation_config.json")
    for file in ([_JsonFile.read(generation)] if generation.exists() else []) + [source]:
        if file.has("eos_token_id"):
            found = file.entries["eos_token_id"]
            ids = found if isinstance(found, list) else [found]
            if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
                raise CheckpointError(f"{file.path}: eos_token_id is {found!r}, expected a token id or a list of them")
            return tuple(ids)
    return ()
