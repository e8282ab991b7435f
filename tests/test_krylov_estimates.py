"""Random estimates: exact where they can be, right on average, and with error bars that hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import evolute as ev
from evolute.krylov import checkpoint as checkpoints
from evolute.krylov.results import Quantity
from families import FAMILIES
from krylov_cases import SPECTRA, D, covered, decaying, draw, flat, hidden, matrix, outliers, plain, pressing_ctrl_c

OP = {name: hidden(values) for name, values in SPECTRA.items()}


def _truth(values: Tensor) -> dict[str, float]:
    sizes = values.abs()
    numbers = {
        "trace": values.sum(),
        "frobenius": values.norm(),
        "nuclear": sizes.sum(),
        "negative_mass": sizes[values < 0].sum() / sizes.sum(),
        "negative_count": (values < 0).double().mean(),
        "effective_rank": sizes.sum() ** 2 / values.square().sum(),
        "stable_rank": values.square().sum() / sizes.max() ** 2,
    }
    return {name: float(value) for name, value in numbers.items()}


def _within(quantity: Quantity, truth: float, level: float = 0.9999) -> bool:
    low, high = quantity.interval(level)
    return low <= truth <= high


# ---------------------------------------------------------------- spectrum


@pytest.mark.parametrize("name", SPECTRA)
def test_all_numbers_of_one_pass(name: str) -> None:
    found = ev.spectrum(OP[name], probes=4, steps=20)
    assert (found.products, found.status) == (80, "sampled")
    for what, truth in _truth(SPECTRA[name]).items():
        assert _within(getattr(found, what), truth), what
    assert float(found.largest[0]) == pytest.approx(float(SPECTRA[name].max()), abs=2 * float(found.largest_bounds[0]))
    assert float(found.smallest[0]) == pytest.approx(
        float(SPECTRA[name].min()), abs=max(2 * float(found.smallest_bounds[0]), 1e-9)
    )


def test_every_number_is_exact_where_the_matrix_is_small() -> None:
    found = ev.spectrum(hidden(outliers(100)))
    assert (found.status, found.products) == ("exact", 100)
    for what, truth in _truth(outliers(100)).items():
        quantity = getattr(found, what)
        assert quantity.exact
        assert float(quantity) == pytest.approx(truth, rel=1e-9)
        assert _within(quantity, truth)
    sizes = outliers(100).abs()
    assert found.condition == pytest.approx(float(sizes.max() / sizes.min()), rel=1e-6)
    assert "100 of 100 dimensions" in found.condition_on
    assert not bool(found.band.any())


def test_what_the_structure_gives_is_exact() -> None:
    M = torch.randn(300, 300, generator=draw(0), dtype=D)
    found = ev.spectrum(ev.from_dense(M + M.T), probes=2, steps=10)
    assert found.trace.exact
    assert float(found.trace) == pytest.approx(2 * float(M.trace()))
    assert found.frobenius.exact
    assert float(found.frobenius) == pytest.approx(float((M + M.T).norm()))
    assert not found.nuclear.exact


@pytest.mark.parametrize("name", SPECTRA)
def test_density_is_a_density(name: str) -> None:
    found = ev.spectrum(OP[name], probes=4, steps=20)
    assert float(torch.trapezoid(found.density, found.grid)) == pytest.approx(1, abs=0.03)
    inside = (found.grid >= 0.0) & (found.grid <= float(SPECTRA[name].max()) * 3)
    above = float(torch.trapezoid(found.density[inside], found.grid[inside]))
    assert above == pytest.approx(float((SPECTRA[name] > 0).double().mean()), abs=0.12)
    assert found.band.shape == found.density.shape == found.grid.shape
    assert bool((found.band >= 0).all())


def test_any_spectral_sum() -> None:
    found = ev.spectrum(OP["flat"], probes=6, steps=20)
    assert _within(found.sum_of(lambda x: (-x).exp()), float((-flat()).exp().sum()))
    assert _within(found.sum_of(lambda x: x**3), float((flat() ** 3).sum()))


def test_the_zero_operator_has_numbers_too() -> None:
    found = ev.spectrum(plain(torch.zeros(1000)), probes=2, steps=10)
    for what in ("trace", "frobenius", "negative_mass", "negative_count", "effective_rank"):
        assert float(getattr(found, what)) == 0.0
    assert str(found)


def test_outliers_are_no_longer_left_to_chance() -> None:
    """Plain Hutchinson would have an error of λ₁² √(2/probes), here 1250."""
    found = ev.spectrum(OP["outliers"], probes=8, steps=20)
    assert found.settled >= 4
    assert found.frobenius.standard_error < 0.01
    assert _within(found.frobenius, float(outliers().norm()))


def test_hidden_copies_are_not_taken_for_one() -> None:
    """20 copies at 5: eight probes see eight dimensions of that space, and must not count them as all of it."""
    values = torch.cat([torch.full((20,), 5.0), torch.full((300,), 0.01), torch.full((80,), -1.0)]).to(D)
    found = ev.spectrum(plain(values), probes=8, steps=20)
    assert _within(found.trace, float(values.sum()))
    assert found.settled == 0


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_scale_scales(scale: float) -> None:
    one, other = (ev.spectrum(hidden(outliers() * s), probes=4, steps=15) for s in (1.0, scale))
    assert float(other.trace) == pytest.approx(float(one.trace) * scale, rel=1e-6)
    assert float(other.negative_count) == pytest.approx(float(one.negative_count), rel=1e-6)
    assert float(other.effective_rank) == pytest.approx(float(one.effective_rank), rel=1e-6)


def test_less_memory_means_groups_of_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evolute.krylov.one_pass.fits", lambda work, wanted, least: 2 * 21)
    found = ev.spectrum(OP["decaying"], probes=5, steps=20)
    assert (found.products, len(found.counts)) == (100, 5)
    for what, truth in _truth(decaying()).items():
        assert _within(getattr(found, what), truth), what


def test_data_subsets_say_how_much_is_data() -> None:
    shifts = torch.randn(12, generator=draw(5), dtype=D)
    found = ev.spectrum([hidden(flat() + s, seed=1) for s in shifts], probes=4, steps=15)
    trace = found.pooled["trace"]
    assert float(trace) == pytest.approx(float(torch.stack([(flat() + s).sum() for s in shifts]).mean()), rel=0.2)
    assert trace.data_spread == pytest.approx(float(shifts.std()) * 400, rel=0.3)
    assert trace.probe_error < 0.1 * trace.data_spread
    assert trace.standard_error == pytest.approx(float(shifts.std()) * 400 / 12**0.5, rel=0.3)
    assert found.products == 12 * 60
    assert "one subset to the next" in str(found)


def test_data_subsets_that_are_all_alike_have_no_spread() -> None:
    found = ev.spectrum([OP["flat"]] * 12, probes=4, steps=15)
    trace = found.pooled["trace"]
    assert trace.data_spread < 2 * trace.probe_error * 12**0.5
    with pytest.raises(ev.VectorError, match="two data subsets or more"):
        ev.spectrum([OP["flat"]])


def test_the_engine_and_the_spectrum() -> None:
    family = next(iter(FAMILIES.values()))()
    H = ev.Hessian(ev.Objective(family.model, family.batches, family.loss))
    values = torch.linalg.eigvalsh(ev.to_dense(H))
    found = ev.spectrum(H, probes=2, steps=40)
    for what in ("trace", "frobenius", "nuclear"):
        assert _within(getattr(found, what), _truth(values)[what]), what


# ---------------------------------------------------------------- trace, diagonal


def test_the_trace_of_a_structure_is_exact() -> None:
    found = ev.trace(ev.from_dense(torch.ones(50, 50, dtype=D)))
    assert (float(found), found.standard_error, found.products, found.status) == (50.0, 0.0, 0, "exact")
    small = ev.trace(hidden(flat(30)))
    assert (small.status, small.products) == ("exact", 30)
    assert float(small) == pytest.approx(float(flat(30).sum()))


@pytest.mark.parametrize("name", SPECTRA)
def test_the_trace_does_not_stop_by_luck(name: str) -> None:
    """Stopping when two running means agree was 24 % off after 6 probes, and did not know."""
    found = ev.trace(OP[name], products=40)
    assert found.products == 40
    assert _within(found, float(SPECTRA[name].sum()))


def test_a_sketch_beats_plain_probes_where_a_few_eigenvalues_dominate() -> None:
    plain_error = (2 * float(outliers().square().sum()) / 64) ** 0.5
    assert ev.trace(OP["outliers"], products=64).standard_error < plain_error / 10


def test_the_trace_in_bfloat16_is_that_of_the_operator() -> None:
    """Finite differences in bfloat16 gave 928 ± 25 for 7.6 ± 2.7."""
    values = torch.cat([torch.tensor([30.0, -10.0]), torch.linspace(-0.5, 1, 500)])
    found = ev.trace(plain(values, torch.bfloat16))
    assert _within(found, float(values.sum())) or float(found) == pytest.approx(float(values.sum()), rel=0.02)


def test_the_diagonal() -> None:
    M = torch.randn(200, 200, generator=draw(0), dtype=D)
    M = M + M.T
    found = ev.diagonal(matrix(M), products=50)
    expected = (M.square().sum(1) - M.diagonal().square()).div(50).sqrt()
    assert torch.allclose(found.standard_error, expected, rtol=0.5)
    low, high = found.interval(0.9999)
    assert bool(((low <= M.diagonal()) & (M.diagonal() <= high)).all())
    assert torch.equal(ev.diagonal(ev.from_dense(M)).estimate, M.diagonal())
    assert ev.diagonal(matrix(M), products=200).status == "exact"


# ---------------------------------------------------------------- block norms


def _grouped(sizes: dict[str, int], seed: int = 0) -> tuple[ev.LinearOperator, Tensor]:
    n = sum(sizes.values())
    M = torch.randn(n, n, generator=draw(seed), dtype=D)
    M = M + M.T
    space = ev.Space({name: (size,) for name, size in sizes.items()}, dtype=D)
    return ev.from_matvec(lambda v: M @ v, space=space), M


def test_block_norms() -> None:
    sizes = {"a": 60, "b": 40, "c": 3}
    op, M = _grouped(sizes)
    table = ev.block_norms(op, probes=20)
    pieces = dict(zip(sizes, M.split([*sizes.values()]), strict=True))
    for i, piece in pieces.items():
        for j, block in zip(sizes, piece.split([*sizes.values()], 1), strict=True):
            assert _within(table[i, j], float(block.norm())), (i, j)
            assert table[i, j].exact == ("c" in (i, j))
    assert table.products == 20 + 20 + 3
    assert torch.equal(table.norms, table.norms.T)
    assert table.asymmetry < 5
    assert table.to_dict()["a"]["b"] == float(table.norms[0, 1])
    error = float(table.standard_errors[0, 1])
    assert f"{float(table.norms[0, 1]):.3g} ± {error:.2g}" in str(table), "the error beside the value"
    assert len({len(line) for line in str(table).splitlines()[:-1]}) == 1, "columns are straight"
    assert "±" not in str(ev.block_norms(op, {"c": "c"})), "what is exact has none"


def test_block_norms_of_a_closed_form_are_exact_and_cost_nothing() -> None:
    layer = torch.nn.TransformerEncoderLayer(4, 2, 5, batch_first=True).double().eval()
    op = ev.closed_form(layer, *(torch.randn(2, 3, 4, dtype=torch.float64) for _ in range(2)))
    table = ev.block_norms(op, ["q", "w1", "norm1.weight"])
    assert table.status == "exact" and table.products == 0
    for a in table.names:
        for b in table.names:
            truth = float(ev.to_dense(op.block(a, b)).norm())
            assert float(table[a, b]) == pytest.approx(truth, rel=1e-12) and table[a, b].standard_error == 0


def test_block_norms_of_chosen_groups() -> None:
    op, M = _grouped({"a": 6, "b": 4})
    table = ev.block_norms(op, {"both": ["a", "b"], "half": ev.Part("a", 0, 0, 3)}, probes=16)
    assert table.status == "exact"
    assert float(table["both", "both"]) == pytest.approx(float(M.norm()))
    assert float(table["half", "both"]) == pytest.approx(float(M[:3].norm()))
    with pytest.raises(KeyError, match="no group 'c' in this table"):
        _ = table["c", "both"]


def test_products_that_are_not_symmetric_show_in_the_table() -> None:
    op, M = _grouped({"a": 40, "b": 40})
    lopsided = torch.triu(M)
    table = ev.block_norms(ev.from_matvec(lambda v: lopsided @ v, space=op.space), probes=20)
    assert table.asymmetry > 5


@pytest.mark.parametrize(("groups", "message"), [([], "at least one name"), ("a", r"expected a list of names")])
def test_groups_that_are_none(groups: Any, message: str) -> None:
    op, _ = _grouped({"a": 6, "b": 4})
    with pytest.raises(ev.UnknownGroupError, match=message):
        ev.block_norms(op, groups)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda op: ev.spectrum(op, probes=0), "probes: expected a number, at least 1, got 0"),
        (lambda op: ev.spectrum(op, steps=0), "steps: expected"),
        (lambda op: ev.spectrum(3), "expected an operator, got int"),
        (lambda op: ev.spectrum([]), "two data subsets or more"),
        (lambda op: ev.spectrum([op, ev.from_dense(torch.eye(3))]), "operators on the same parameters, got sizes 3, "),
        (lambda op: ev.trace(op, products=3), "at least 4, got 3"),
        (lambda op: ev.diagonal(op, products=0), "at least 1, got 0"),
        (lambda op: ev.block_norms(op, probes=0), "probes: expected"),
    ],
)
def test_what_makes_no_sense(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ev.VectorError, match=message):
        call(OP["flat"])


# ---------------------------------------------------------------- stopping and going on

CALLS: dict[str, Callable[..., Any]] = {
    "spectrum": lambda op, **options: ev.spectrum(op, 3, 20, **options),
    "trace": lambda op, **options: ev.trace(op, 40, **options),
    "diagonal": lambda op, **options: ev.diagonal(op, 40, **options),
    "block norms": lambda op, **options: ev.block_norms(
        op, {f"{i}": ev.Part("v", 0, 50 * i, 50 * i + 50) for i in range(8)}, 5, **options
    ),
}


def _numbers(result: Any) -> Tensor:
    if hasattr(result, "trace"):
        return torch.tensor([float(result.trace), float(result.frobenius), result.nuclear.standard_error])
    if hasattr(result, "norms"):
        return torch.cat([result.norms, result.standard_errors])
    return torch.as_tensor(result.estimate)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("at", [1, 13, 29])
def test_resuming_gives_the_same_bits(name: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "EVERY", 0.0)
    op, file = OP["decaying"], tmp_path / "run"
    whole = CALLS[name](op, generator=draw(7))
    stopped = CALLS[name](pressing_ctrl_c(op, at + 1), generator=draw(7), checkpoint=file)
    assert stopped.interrupted
    assert stopped.products < whole.products
    resumed = CALLS[name](op, generator=draw(7), checkpoint=file)
    assert not resumed.interrupted
    assert resumed.products == whole.products
    assert torch.equal(_numbers(resumed), _numbers(whole))


def test_groups_of_probes_resume_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evolute.krylov.one_pass.fits", lambda work, wanted, least: 21)
    whole = ev.spectrum(OP["decaying"], probes=3, steps=20)
    for at in (10, 25):
        assert ev.spectrum(pressing_ctrl_c(OP["decaying"], at), 3, 20, checkpoint=tmp_path / "run").interrupted
    resumed = ev.spectrum(OP["decaying"], 3, 20, checkpoint=tmp_path / "run")
    assert torch.equal(_numbers(resumed), _numbers(whole))


def test_partial_results_have_error_bars() -> None:
    found = ev.trace(pressing_ctrl_c(OP["flat"], at=30), 64)
    assert (found.status, found.products) == ("interrupted", 30)
    assert _within(found, float(flat().sum()))
    spectrum = ev.spectrum(pressing_ctrl_c(OP["flat"], at=60), 4, 80)
    assert spectrum.interrupted
    assert _within(spectrum.trace, float(flat().sum()))


# ---------------------------------------------------------------- 99 % intervals, 200 trials each


def _quantities(name: str, what: str) -> Callable[[int], tuple[float, float]]:
    return lambda seed: getattr(ev.spectrum(OP[name], 4, 15, generator=draw(seed)), what).interval(0.99)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["trace", "frobenius", "nuclear", "negative_mass", "negative_count", "effective_rank"])
@pytest.mark.parametrize("name", SPECTRA)
def test_intervals_of_one_pass_cover(name: str, what: str) -> None:
    assert covered(_quantities(name, what), _truth(SPECTRA[name])[what]) >= 0.97


@pytest.mark.parametrize("products", [4, 8, 24])
@pytest.mark.parametrize("name", SPECTRA)
def test_intervals_of_the_trace_cover(name: str, products: int) -> None:
    """With 8 products, one outlier may be left to four random vectors, whose scatter alone covers 94.7 %."""
    op, truth = plain(SPECTRA[name]), float(SPECTRA[name].sum())
    assert covered(lambda s: ev.trace(op, products, generator=draw(s)).interval(0.99), truth) >= 0.97


def test_the_error_of_the_trace_is_that_of_the_trace() -> None:
    """E error² = E (estimate − truth)², as it is with an exact variance."""
    for values in SPECTRA.values():
        found = [ev.trace(plain(values), 12, generator=draw(s)) for s in range(200)]
        errors = torch.tensor([(float(each) - float(values.sum())) ** 2 for each in found])
        told = torch.tensor([each.standard_error**2 for each in found])
        assert float(errors.mean() / told.mean()) == pytest.approx(1, abs=0.35)


def _rows_of(count: int) -> Tensor:
    """Symmetric, with ±1 at so many places beside the diagonal of each row: the fewer, the less like a Gaussian."""
    angles = torch.arange(1, count + 1)
    return sum((torch.diag(torch.ones(60 - int(a)), int(a)) for a in angles), torch.zeros(60, 60)).to(D)


ROWS = {"dense": torch.randn(60, 60, generator=draw(0), dtype=D), **{f"{k} a side": _rows_of(k) for k in (1, 2)}}
ROWS["pairs"] = torch.block_diag(*[torch.tensor([[0.0, 1.0], [0.0, 0.0]])] * 30).to(D)


@pytest.mark.parametrize("products", [9, 10, 24])
@pytest.mark.parametrize("rows", ROWS)
def test_intervals_of_the_diagonal_cover(rows: str, products: int) -> None:
    """Each entry in 99 % of all cases, whatever its row; Student's t has 96 % with nine samples of two values.

    The worst of 60 entries may have more misses in 200 trials than 2, which is the mean at 99 %. That one has more than
    8 has a probability of 1.3 % even then, and here, where few rows come near the bound, 6 are not exceeded.
    """
    M, hits = ROWS[rows] + ROWS[rows].T, torch.zeros(60)
    for seed in range(200):
        low, high = ev.diagonal(matrix(M), products, generator=draw(seed)).interval(0.99)
        hits += (low <= M.diagonal()) & (M.diagonal() <= high)
    assert float(hits.mean()) >= 0.99 * 200
    assert float(hits.min()) >= 0.97 * 200, "60 entries: the worst of them"


def test_no_interval_is_read_from_samples_that_may_agree_by_chance() -> None:
    """Four samples of ±1 are alike in one case of eight, and their error is then 0."""
    M = ROWS["pairs"] + ROWS["pairs"].T
    found = [ev.diagonal(matrix(M), 4, generator=draw(seed)) for seed in range(10)]
    assert any(bool((each.standard_error == 0).any()) for each in found)
    assert all(bool(each.interval(0.99)[1].isinf().all()) for each in found)
    low, high = ev.diagonal(matrix(M), 59).interval(0.99)
    assert bool((high - low).isfinite().all())


@pytest.mark.parametrize("probes", [4, 8])
@pytest.mark.parametrize("rank", [1, 3, 40])
def test_intervals_of_block_norms_cover(rank: int, probes: int) -> None:
    U = torch.randn(80, rank, generator=draw(2), dtype=D)
    M = U @ U.T
    space = ev.Space({"a": (40,), "b": (40,)}, dtype=D)
    op = ev.from_matvec(lambda v: M @ v, space=space)
    for pair, block in {("a", "a"): M[:40, :40], ("a", "b"): M[:40, 40:]}.items():
        share = covered(
            lambda s, pair=pair: ev.block_norms(op, probes=probes, generator=draw(s))[pair].interval(0.99),
            float(block.norm()),
        )
        assert share >= 0.97, pair
