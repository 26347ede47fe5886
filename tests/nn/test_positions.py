"""Position schemes against the papers: formulas evaluated number by number, and published tables."""

from __future__ import annotations

import math

import pytest
import torch

from attent.nn import AlibiConfig, LearnedConfig, RelativeConfig, RotaryConfig, SinusoidalConfig, make_sinusoids
from attent.nn.positions import (
    Llama3Scaling,
    Positions,
    RotaryPositions,
    SinusoidalPositions,
    build_positions,
    compute_alibi_slopes,
    compute_buckets,
)


def sinusoid_by_formula(pos: int, width: int) -> list[float]:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos(pos / 10000^(2i / d_model))."""
    angles = [pos / 10000 ** ((column - column % 2) / width) for column in range(width)]
    return [math.cos(angle) if column % 2 else math.sin(angle) for column, angle in enumerate(angles)]


@pytest.mark.parametrize("width", [1, 2, 7, 8, 512])
def test_sinusoids_are_the_papers(width: int) -> None:
    at = torch.tensor([0, 1, 5, 100, 5000, 100_000])
    expected = torch.tensor([sinusoid_by_formula(pos, width) for pos in at.tolist()])
    torch.testing.assert_close(
        make_sinusoids(at, width), expected, rtol=0, atol=1e-6
    )  # float32's last digit, late ones too
    sines, cosines = expected[:, 0::2], expected[:, 1::2]
    torch.testing.assert_close(make_sinusoids(at, width, "halves"), torch.cat([sines, cosines], 1), rtol=0, atol=1e-6)


def test_sinusoids_support_positions_per_row() -> None:
    at = torch.tensor([[0, 1, 2], [7, 8, 9]])
    rows = make_sinusoids(at, 6)
    assert rows.shape == (2, 3, 6)
    assert torch.equal(rows[1], make_sinusoids(at[1], 6))


def test_each_scheme_uses_one_method() -> None:
    """embed, compute_angles or compute_bias: the other two have no effect."""
    configs = {
        "embed": (SinusoidalConfig(), SinusoidalConfig(order="halves"), LearnedConfig(max_length=4)),
        "angles": (RotaryConfig(),),
        "bias": (RelativeConfig(), AlibiConfig()),
    }
    x, at = torch.randn(1, 4, 8), torch.arange(4)
    for method, schemes in configs.items():
        for config in schemes:
            scheme = build_positions(config, width=8, heads=2, head_width=4, causal=True)
            assert torch.equal(scheme.embed(x, at), x) == (method != "embed")
            assert (scheme.compute_angles(at) is None) == (method != "angles")
            assert (scheme.compute_bias(at, at) is None) == (method != "bias")


def test_embeddings_are_added() -> None:
    x, at = torch.randn(2, 3, 8), torch.tensor([4, 0, 2])
    scheme = SinusoidalPositions(SinusoidalConfig())
    torch.testing.assert_close(scheme.embed(x, at) - x, make_sinusoids(at, 8).expand(2, 3, 8))
    learned = build_positions(LearnedConfig(max_length=5), width=8, heads=2, head_width=4, causal=False)
    assert torch.equal(learned.embed(x, at), x + learned.weight[at])
    assert learned.max_length == 5
    assert Positions().max_length is None


# --- rotary --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["halves", "interleaved"])
def test_rotary_depends_on_distance_only(order: str) -> None:
    rotary = RotaryPositions(RotaryConfig(order=order), 8)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(q_at: int, k_at: int) -> float:
        return float(
            (
                rotary.compute_angles(torch.tensor([q_at])).rotate(q)
                * rotary.compute_angles(torch.tensor([k_at])).rotate(k)
            ).sum()
        )

    for distance in (-3, 0, 1, 6):
        assert score(4, 4 + distance) == pytest.approx(score(90, 90 + distance), abs=1e-4)  # angles are float32
    assert abs(score(4, 4) - score(4, 5)) > 1e-2


@pytest.mark.parametrize("order", ["halves", "interleaved"])
def test_rotary_turns_pairs_by_hand(order: str) -> None:
    """The pair (a, b) number i at position t becomes (a cos - b sin, a sin + b cos) of the angle t base^(-2i / D)."""
    D, base = 6, 100.0
    rotary = RotaryPositions(RotaryConfig(order=order, base=base), D)
    x = torch.randn(1, 2, 3, D, dtype=torch.float64)
    turned = rotary.compute_angles(torch.tensor([0, 1, 7])).rotate(x)
    for head in range(2):
        for i, t in enumerate((0, 1, 7)):
            for pair in range(D // 2):
                first, second = (pair, pair + D // 2) if order == "halves" else (2 * pair, 2 * pair + 1)
                a, b = float(x[0, head, i, first]), float(x[0, head, i, second])
                cos, sin = math.cos(t * base ** (-2 * pair / D)), math.sin(t * base ** (-2 * pair / D))
                assert float(turned[0, head, i, first]) == pytest.approx(a * cos - b * sin, abs=1e-5)
                assert float(turned[0, head, i, second]) == pytest.approx(a * sin + b * cos, abs=1e-5)


def test_rotary_supports_positions_per_row() -> None:
    rotary, x = RotaryPositions(RotaryConfig(), 4), torch.randn(2, 3, 2, 4)
    both = rotary.compute_angles(torch.tensor([[0, 1], [5, 6]])).rotate(x)
    torch.testing.assert_close(both[1:], rotary.compute_angles(torch.tensor([5, 6])).rotate(x[1:]))


# --- T5 ------------------------------------------------------------------------------------------------------------

# Distances key - query and their buckets for 32 buckets and a reach of 128, worked out from the T5 paper's rule
# (half of the buckets for each side; of these, half exact and half logarithmic; and the past alone for a decoder).
BOTH_WAYS = {0: 0, -1: 1, -7: 7, -8: 8, -11: 8, -12: 9, -16: 10, -32: 12, -64: 14, -127: 15, -128: 15, -999: 15}
BOTH_WAYS |= {-distance: bucket + 16 for distance, bucket in BOTH_WAYS.items() if distance}
PAST = {5: 0, 0: 0, -1: 1, -15: 15, -16: 16, -18: 16, -19: 17, -32: 21, -64: 26, -113: 31, -128: 31, -999: 31}


@pytest.mark.parametrize(("table", "causal"), [(BOTH_WAYS, False), (PAST, True)], ids=["encoder", "decoder"])
def test_t5_buckets(table: dict[int, int], causal: bool) -> None:
    assert compute_buckets(torch.tensor(list(table)), 32, 128, causal).tolist() == list(table.values())


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (8, 20), (64, 256)])
def test_t5_buckets_are_transformers(causal: bool, buckets: int, reach: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(-300, 301)
    theirs = t5.T5Attention._relative_position_bucket(
        distance, bidirectional=not causal, num_buckets=buckets, max_distance=reach
    )
    assert torch.equal(compute_buckets(distance, buckets, reach, causal), theirs)


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])
def test_relative_bias_is_one_number_per_head_and_bucket(causal: bool) -> None:
    config = RelativeConfig(buckets=8, max_distance=10)
    scheme = build_positions(config, width=6, heads=3, head_width=2, causal=causal)
    bias = scheme.compute_bias(torch.tensor([2, 3]), torch.arange(5))
    assert bias.shape == (1, 3, 2, 5)
    for i, q in enumerate((2, 3)):
        for k in range(5):
            bucket = int(compute_buckets(torch.tensor(k - q), 8, 10, causal))
            assert torch.equal(bias[0, :, i, k], scheme.weight[bucket])
    rows = scheme.compute_bias(torch.tensor([[2, 3], [0, 1]]), torch.arange(5))
    assert torch.equal(rows[:1], bias)


# --- ALiBi ---------------------------------------------------------------------------------------------------------


def test_alibi_slopes_are_the_published_ones() -> None:
    """8 heads: 1/2 ... 1/256 as printed in the paper; 12 heads: as in the authors' code (and BLOOM's)."""
    eight = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    between = [0.7071067811865476, 0.35355339059327384, 0.17677669529663692, 0.08838834764831849]
    published = {1: [1 / 256], 8: eight, 12: [*eight, *between], 16: [2 ** (-i / 2) for i in range(1, 17)]}
    for heads, slopes in published.items():
        assert compute_alibi_slopes(heads).tolist() == pytest.approx(slopes, rel=1e-6)


def test_alibi_grows_with_distance() -> None:
    scheme = build_positions(AlibiConfig(), width=8, heads=2, head_width=4, causal=False)
    bias = scheme.compute_bias(torch.tensor([1, 4]), torch.arange(4))
    assert bias.shape == (1, 2, 2, 4)
    distances = torch.tensor([[1.0, 0, 1, 2], [4, 3, 2, 1]])
    torch.testing.assert_close(bias[0, 0], -distances / 2**4)
    torch.testing.assert_close(bias[0, 1], -distances / 2**8)


def test_scaled_rotary_positions_need_a_high_factor_above_the_low_one() -> None:
    Llama3Scaling(low_freq_factor=1.0, high_freq_factor=1.5)
    for high in (1.0, 0.5):
        with pytest.raises(
            ValueError, match=f"`high_freq_factor` must be more than `low_freq_factor`=1, but is {high:g}"
        ):
            Llama3Scaling(low_freq_factor=1.0, high_freq_factor=high)


def test_the_order_of_features_is_checked() -> None:
    with pytest.raises(ValueError, match="`order`"):
        RotaryConfig(order="thirds")  # type: ignore[arg-type]
