"""Where the parts of a parameter lie in a checkpoint: the ranks' rectangles tile the whole, and hold the right numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from slime_ppo.config.model_shape import ModelShape, padded_vocab_size
from slime_ppo.conversion.mapping import Split
from slime_ppo.conversion.shapes import megatron_shape
from slime_ppo.conversion.shard import shard, unshard
from slime_ppo.conversion.table import ConversionTable, Head
from slime_ppo.conversion.torch_dist import Band, Place, Rectangle, is_tied_copy, place_of, stored_name
from slime_ppo.conversion.torch_dist_folder import is_weight
from tests.helpers.tiny_family import make_tiny_family


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ConversionTable]:
    """A dense family with biases, tied and as a critic, and a mixture of experts."""
    root = tmp_path_factory.mktemp("families")

    def table(folder: Path, head: Head) -> ConversionTable:
        return ConversionTable(ModelShape.from_hf_folder(folder), head)

    dense = make_tiny_family(root / "qwen2", "qwen2", tie=True, seed=0)
    mixture = make_tiny_family(root / "qwen3_moe", "qwen3_moe", tie=False, seed=0)
    return {
        "tied": table(dense, "language_model"),
        "critic": table(dense, "value"),
        "mixture": table(mixture, "language_model"),
    }


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("model", ["tied", "critic", "mixture"])
def test_ranks_rectangles_tile_every_parameter_with_its_own_numbers(
    tables: dict[str, ConversionTable], model: str, size: int
) -> None:
    """Flat ranges, as data-parallel ranks hold them, cut each rank's part at odd places."""
    table, rng = tables[model], np.random.default_rng(0)
    vocab = padded_vocab_size(table.shape.vocab_size, divisible_by=32, tp_size=size)
    for rule in table.rules.values():
        whole = torch.randn(megatron_shape(rule, table.shape, vocab_rows=table.shape.vocab_size))
        parts = unshard(
            rule.split,
            [whole],
            num_query_groups=table.shape.num_query_groups,
            num_heads=table.shape.num_attention_heads,
            vocab_size=table.shape.vocab_size,
        )
        found, filled = torch.full(whole.shape, torch.nan), 0
        for rank in range(size):
            local = shard(
                rule.split, parts, num_query_groups=table.shape.num_query_groups, padded_vocab=vocab, tp_size=size, tp_rank=rank
            )
            place = place_of(rule, table, tuple(local.shape), size=size, rank=rank)
            assert place.whole == (whole.shape if place.expert is None else (table.shape.num_experts, *whole.shape))
            flat = local.reshape(-1)
            cuts = [0, *sorted(rng.integers(0, len(flat), 3).tolist()), len(flat)]
            for start, end in zip(cuts, cuts[1:], strict=False):
                for one in place.rectangles(start, end):
                    sizes, offsets = (one.sizes, one.offsets) if place.expert is None else (one.sizes[1:], one.offsets[1:])
                    box = tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))
                    elements = torch.Size(sizes).numel()
                    assert start <= one.flat_start and one.flat_start + elements <= end
                    found[box] = flat[one.flat_start : one.flat_start + elements].view(sizes)
                    filled += elements
        assert torch.equal(found, whole), rule.megatron
        assert filled == whole.numel() * (size if rule.split is Split.REPLICATED else 1)


def test_range_of_a_matrix_is_three_rectangles_at_most() -> None:
    place = Place("w", (8, 4), (4, 4), (Band(0, 4, 4, 0),), None, of_vocabulary=False)
    assert list(place.rectangles(1, 14)) == [
        Rectangle(1, (4, 1), (1, 3)),
        Rectangle(4, (5, 0), (2, 4)),
        Rectangle(12, (7, 0), (1, 2)),
    ]
    assert list(place.rectangles(5, 7)) == [Rectangle(5, (5, 1), (1, 2))]
    assert list(place.rectangles(3, 3)) == []


def test_rows_of_padding_are_in_no_rectangle(tables: dict[str, ConversionTable]) -> None:
    table = tables["tied"]
    rule, vocab = table.rules["embedding.word_embeddings.weight"], table.shape.vocab_size
    for rows in (vocab, vocab + 28):  # the second rank's begin where the vocabulary ends, and behind that
        last = place_of(rule, table, (rows, 4), size=2, rank=1)
        assert last.padded and list(last.rectangles(0, 4 * rows)) == []
    first = place_of(rule, table, (vocab - 1, 4), size=2, rank=1)
    assert list(first.rectangles(0, 4 * vocab)) == [Rectangle(0, (vocab - 1, 0), (1, 4))]


def test_is_weight_tells_parameters_from_whatever_else_training_has_saved() -> None:
    layer = "decoder.layers.0.mlp.linear_fc1"
    others = (
        *(f"optimizer.state.exp_avg.{layer}.weight", f"chained_0.optimizer.state.param.{layer}.weight", "rng_state/shard_0_1"),
        *("opt_param_scheduler", f"{layer}._extra_state/shard_0_1"),
    )
    assert [is_weight(key) for key in (f"{layer}.weight", "output_layer.weight", *others)] == [True, True, *[False] * 5]


def test_names_in_a_checkpoint_are_those_of_megatron(tables: dict[str, ConversionTable]) -> None:
    tied, critic, mixture = tables["tied"], tables["critic"], tables["mixture"]
    output = "output_layer.weight"
    assert stored_name(tied.rules[output], tied) == ("embedding.word_embeddings.weight", None) and is_tied_copy(
        tied.rules[output], tied
    )
    assert stored_name(critic.rules[output], critic) == (output, None) and not is_tied_copy(critic.rules[output], critic)
    expert = mixture.rules["decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"]
    assert stored_name(expert, mixture) == ("decoder.layers.1.mlp.experts.experts.linear_fc2.weight", 3)
