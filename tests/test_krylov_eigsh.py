"""Eigenvalues at the ends: known spectra, multiplicities, signs, scales, and what other libraries got wrong."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evolute as ev
from evolute.krylov import checkpoint as checkpoints
from families import FAMILIES
from krylov_cases import SPECTRA, D, decaying, draw, ends, flat, hidden, matrix, outliers, plain, pressing_ctrl_c


def _close(found: Tensor, truth: Tensor, tol: float = 1e-3) -> bool:
    return bool(((found.to(D) - truth).abs() <= tol * truth.abs().max()).all())


# ---------------------------------------------------------------- known spectra


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SPECTRA)
def test_both_ends(name: str, dtype: torch.dtype) -> None:
    found = ev.eigsh(hidden(SPECTRA[name], dtype=dtype), k=4, tol=1e-4)
    assert found.status == "converged"
    assert bool(found.converged.all())
    assert bool(((found.relative <= 1e-4) | (found.residuals <= found.rounding)).all())
    assert torch.allclose(found.values, ends(SPECTRA[name], 4), rtol=1e-4)


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
def test_one_end(which: Any) -> None:
    values = torch.cat([torch.tensor([7.0, -9.0, -8.0, 6.0], dtype=D), flat(300) / 3])
    truth = {"largest": [1.0, 6.0, 7.0], "smallest": [-9.0, -8.0, -1 / 3], "magnitude": [-9.0, -8.0, 7.0]}
    found = ev.eigsh(hidden(values), k=3, which=which, tol=1e-5)
    assert torch.allclose(found.values, torch.tensor(truth[which], dtype=D), rtol=1e-4)


def test_ends_in_their_own_order() -> None:
    found = ev.eigsh(plain(torch.arange(1.0, 201.0)), k=2)
    assert [round(x) for x in found.largest.tolist()] == [200, 199]
    assert [round(x) for x in found.smallest.tolist()] == [1, 2]
    assert len(found) == 4


@pytest.mark.parametrize(("block", "seed"), [(1, 0), (2, 0), (2, 1), (2, 2), (4, 0), (4, 1)])
def test_multiplicities_beyond_the_block(block: int, seed: int) -> None:
    """5 copies at the top, 3 below them, 12 at the bottom, of which 10 are asked for."""
    copies = [torch.full((5,), 10.0), torch.full((3,), 9.5), torch.full((12,), -3.0)]
    values = torch.cat([*copies, torch.linspace(-1, 1, 400)]).to(D)
    found = ev.eigsh(hidden(values), block=block, generator=draw(seed))
    assert found.status == "converged"
    assert torch.allclose(found.values, ends(values, 10), rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_eigenvalue_many_times(dtype: torch.dtype) -> None:
    """The random vectors that join must have had time to show what they hold, rounding or not."""
    values = torch.arange(-5.0, 6.0).repeat(50).to(D)
    found = ev.eigsh(plain(values, dtype), k=6)
    assert torch.allclose(found.values, ends(values, 6), rtol=1e-5)


def test_a_tight_cluster() -> None:
    values = torch.cat([10 - 1e-6 * torch.arange(4, dtype=D), torch.tensor([9.0], dtype=D), flat(400) / 3])
    found = ev.eigsh(hidden(values), k=6, which="largest")
    assert torch.allclose(found.values, values.sort().values[-6:], rtol=1e-3)


def test_saddles_with_the_same_size_at_both_ends() -> None:
    """Power iteration finds neither of ±λ."""
    values = torch.cat([torch.tensor([5.0, -5.0], dtype=D), torch.linspace(-1, 1, 400, dtype=D)])
    assert _close(ev.eigsh(hidden(values), k=1).values, torch.tensor([-5.0, 5.0], dtype=D))
    assert _close(ev.eigsh(hidden(values), k=2, which="magnitude").values, torch.tensor([-5.0, 5.0], dtype=D))


def test_the_zero_operator() -> None:
    found = ev.eigsh(plain(torch.zeros(500)), k=3)
    assert found.values.tolist() == [0.0] * 6
    assert found.status == "converged"
    assert found.relative.tolist() == [0.0] * 6


def test_low_rank_reaches_zero_at_rounding() -> None:
    values = torch.cat([torch.tensor([5.0, 3.0]), torch.zeros(500)]).to(D)
    found = ev.eigsh(hidden(values), k=4)
    assert found.status == "converged"
    assert torch.allclose(found.values, ends(values, 4), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6, 1e12])
def test_scale_changes_nothing(scale: float, dtype: torch.dtype) -> None:
    """Dividing by a norm plus 1e-6 changed the sign of the smallest eigenvalue of a small loss."""
    one = ev.eigsh(hidden(outliers(), dtype=dtype), k=3)
    other = ev.eigsh(hidden(outliers() * scale, dtype=dtype), k=3)
    assert torch.allclose(other.values, one.values * scale, rtol=1e-4)
    assert other.products == one.products


@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_small_operators_are_written_down(n: int) -> None:
    values = torch.arange(float(n), dtype=D)
    found = ev.eigsh(hidden(values), k=5)
    assert (found.status, found.products) == ("exact", n)
    assert torch.allclose(found.values, values if n <= 10 else ends(values, 5), atol=1e-12)


def test_what_does_not_converge_is_written_down_where_that_is_cheaper() -> None:
    """Eigenvalues of 1e-8 beside 30, to a thousandth of each."""
    values = torch.randn(500, generator=draw(0), dtype=D).abs() ** 3
    found = ev.eigsh(plain(values), k=3)
    assert found.status == "exact"
    assert torch.allclose(found.values, ends(values, 3), rtol=1e-12)


def test_many_of_few() -> None:
    values = decaying(60)
    assert torch.allclose(ev.eigsh(hidden(values), k=29).values, ends(values, 29))


def test_past_fifty_steps_each_eigenvalue_comes_once() -> None:
    """Reorthogonalisation that was switched off past 50 steps returned the top eigenvalue five times."""
    values = torch.cat([torch.tensor([100.0, 99.0, 98.0]), torch.linspace(0, 1, 2000)]).to(D)
    found = ev.eigsh(plain(values), k=5, which="largest")
    assert torch.allclose(found.values, values.sort().values[-5:], rtol=1e-3)
    assert found.orthogonality < 1e-13


# ---------------------------------------------------------------- vectors, precision, engine


def test_vectors_and_their_residuals() -> None:
    op = hidden(outliers())
    found = ev.eigsh(op, k=3, tol=1e-6, vectors=True)
    assert found.vectors is not None
    V = found.vectors
    assert V.shape == (400, 6)
    assert torch.allclose(V.T @ V, torch.eye(6, dtype=D), atol=1e-12)
    residuals = (op @ V - V * found.values).norm(dim=0)
    assert torch.allclose(residuals, found.residuals, atol=1e-11)


def test_vectors_in_double_over_a_float32_operator() -> None:
    found = ev.eigsh(hidden(outliers(), dtype=torch.float32), k=2, dtype=D, vectors=True)
    assert found.vectors is not None
    assert found.vectors.dtype == D
    assert found.provenance.precision == "float64"
    assert _close(found.values, ends(outliers(), 2))


def test_an_operator_in_bfloat16_with_float32_vectors() -> None:
    values = torch.cat([torch.tensor([8.0, -6.0]), torch.linspace(-1, 1, 300)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ev.CurvatureWarning)
        found = ev.eigsh(plain(values, torch.bfloat16), k=1, tol=1e-2)
    assert _close(found.values, torch.tensor([-6.0, 8.0], dtype=D), 1e-2)


@pytest.mark.parametrize("name", [*FAMILIES][:4])
def test_the_hessian_of_a_model(name: str) -> None:
    family = FAMILIES[name]()
    H = ev.Hessian(ev.Objective(family.model, family.batches, family.loss))
    truth = torch.linalg.eigvalsh(ev.to_dense(H))
    found = ev.eigsh(H, k=3, tol=1e-6, basis=40)
    assert torch.allclose(found.values, ends(truth, 3), rtol=1e-5, atol=1e-9 * float(truth.abs().max()))


def test_a_loss_scaled_by_a_millionth_keeps_its_signs() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1)), torch.randn(30, 6)
    found = []
    for scale in (1.0, 1e-6):
        loss = ev.Loss(lambda m, b: m(b[0]), lambda o, b, s=scale: (s * (o - b[1]).square().sum(), len(o)))
        found.append(ev.eigsh(ev.Hessian(ev.Objective(model, [(x, x[:, :1] ** 2)], loss)), k=3, basis=20).values)
    assert float(found[0][0]) < 0
    assert torch.allclose(found[1], found[0] * 1e-6, rtol=1e-3)


def test_the_global_random_numbers_are_left_alone() -> None:
    before = torch.get_rng_state()
    first = ev.eigsh(hidden(outliers()), k=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(ev.eigsh(hidden(outliers()), k=2).values, first.values)
    assert first.provenance.seed == 0


def test_products_that_change_from_call_to_call_are_noticed() -> None:
    """Dropout or shuffling: identical vectors, other answers."""
    noise, M = draw(1), torch.diag(outliers())
    op = ev.from_matvec(lambda v: M @ (v * (torch.rand(400, generator=noise, dtype=D) > 0.2)), 400, dtype=D)
    with pytest.warns(ev.CurvatureWarning, match="products differ from call to call"):
        found = ev.eigsh(op, k=2)
    assert found.status == "not converged"
    assert not bool(found.converged.all())


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_float32_products_whose_squares_are_beyond_it(scale: float) -> None:
    """Their squares are 0 or infinite in float32: all looked like the zero operator, and converged at once."""
    values = outliers().float()
    op = ev.from_matvec(lambda v: values * v * scale, 400)
    found = ev.eigsh(op, k=3)
    assert found.status == "converged"
    assert torch.allclose(found.values / scale, ends(outliers(), 3), rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-170, 1e170])
def test_products_whose_squares_are_beyond_float64_are_refused(scale: float) -> None:
    with pytest.raises(ev.NonFiniteError, match=r"has length \de.1[67]\d: multiply it by a number"):
        ev.eigsh(hidden(outliers() * scale), k=3)


def test_a_zero_among_large_values_has_converged_at_rounding() -> None:
    """Many restarts: rounding adds up, and no product differs from call to call."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ev.CurvatureWarning)
        found = ev.eigsh(plain(torch.arange(3000.0, dtype=D)), k=3)
    assert found.status == "converged"
    assert _close(found.values, torch.tensor([0.0, 1, 2, 2997, 2998, 2999], dtype=D), 1e-9)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k: expected how many eigenvalues, at least 1, got 0"),
        ({"which": "LM"}, "which: expected one of 'both', 'largest', 'smallest', 'magnitude', got 'LM'"),
        ({"tol": 0}, "tol: expected a relative residual between 0 and 1"),
        ({"tol": "fine"}, "tol: expected a relative residual between 0 and 1, such as 1e-3, got 'fine'"),
        ({"max_products": 0}, "max_products: expected a number, at least 1, got 0"),
        ({"block": 0}, "block: expected at least 1 vector"),
        ({"basis": 10}, "basis: expected at least 28 vectors"),
        ({"dtype": torch.bfloat16}, "dtype: expected torch.float32 or torch.float64"),
        ({"generator": 7}, "generator: expected a torch.Generator, got int"),
    ],
)
def test_what_makes_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ev.VectorError, match=message):
        ev.eigsh(hidden(flat()), **arguments)


def test_what_has_no_real_spectrum() -> None:
    space = ev.Space({"a": (3,), "b": (3,)}, dtype=D)
    op = ev.from_dense(torch.ones(6, 6, dtype=D), space=space)
    with pytest.raises(ev.VectorError, match="expected a symmetric operator"):
        ev.eigsh(op.block("a", "b"))
    wrong: Any = torch.eye(3)
    with pytest.raises(ev.VectorError, match=r"expected an operator, got Tensor; wrap a matrix in ev.from_dense"):
        ev.eigsh(wrong)
    with pytest.raises(ev.VectorError, match="at least one entry"):
        ev.eigsh(plain(torch.ones(0)))


@pytest.mark.parametrize("n", [5, 500])
def test_a_product_that_is_not_finite(n: int) -> None:
    with pytest.raises(ev.NonFiniteError, match="is NaN or infinite"):
        ev.eigsh(plain(torch.full((n,), torch.nan)))


def test_more_memory_than_there_is() -> None:
    huge = ev.from_matvec(lambda v: v, 1 << 50)
    with pytest.raises(ev.TooLargeError, match=r"a basis of .* vectors .* needs .* Ask for fewer"):
        ev.eigsh(huge, k=1)


# ---------------------------------------------------------------- stopping and going on


def test_out_of_products() -> None:
    found = ev.eigsh(hidden(flat()), k=10, tol=1e-9, max_products=60)
    assert found.status == "not converged"
    assert found.products <= 62
    assert "not converged" in str(found)


def test_ctrl_c_gives_what_is_known() -> None:
    found = ev.eigsh(pressing_ctrl_c(hidden(flat()), at=40), k=5, tol=1e-8)
    assert (found.status, found.interrupted, found.products) == ("interrupted", True, 40)
    distances = (flat()[:, None] - found.values).abs().min(0).values
    assert bool((distances <= found.residuals).all()), "each within its bound of some eigenvalue"


def test_ctrl_c_twice_stops_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        ev.eigsh(pressing_ctrl_c(hidden(flat()), at=39, times=2), k=5, tol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_resuming_gives_the_same_bits(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "EVERY", 0.0)
    op, file = hidden(decaying(), dtype=dtype), tmp_path / "run.safetensors"
    whole = ev.eigsh(op, k=5, tol=1e-5, generator=draw(4), vectors=True)
    for at in (20, 12):
        partial = ev.eigsh(pressing_ctrl_c(op, at=at), k=5, tol=1e-5, generator=draw(4), checkpoint=file)
        assert partial.interrupted
    resumed = ev.eigsh(op, k=5, tol=1e-5, generator=draw(4), checkpoint=file, vectors=True)
    assert torch.equal(resumed.values, whole.values)
    assert torch.equal(resumed.residuals, whole.residuals)
    assert whole.vectors is not None
    assert resumed.vectors is not None
    assert torch.equal(resumed.vectors, whole.vectors)


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    first = ev.eigsh(hidden(flat()), k=2, checkpoint=tmp_path / "run")
    again = ev.eigsh(hidden(flat()), k=2, checkpoint=tmp_path / "run")
    assert torch.equal(first.values, again.values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 3}, "k is 2 there and 3 here"),
        ({"tol": 1e-4}, "tol is 0.001 there and 0.0001 here"),
        ({"which": "largest"}, "which is 'both' there"),
        ({"generator": draw(1)}, "seed is 0 there and 1 here"),
        ({"dtype": torch.float32}, "precision is 'torch.float64' there"),
    ],
)
def test_a_checkpoint_of_other_work_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "run"
    ev.eigsh(hidden(flat()), k=2, checkpoint=file)
    with pytest.raises(ev.CheckpointError, match=message):
        ev.eigsh(hidden(flat()), **({"k": 2} | change), checkpoint=file)


def test_a_checkpoint_of_another_operator_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run"
    ev.eigsh(hidden(flat()), k=2, checkpoint=file)
    with pytest.raises(ev.CheckpointError, match="another operator of the same size"):
        ev.eigsh(hidden(flat() * 1.1), k=2, checkpoint=file)
    with pytest.raises(ev.CheckpointError, match=r"operator is 'Matvec\(400×400"):
        ev.eigsh(hidden(flat(300)), k=2, checkpoint=file)
    moved = draw(0)
    torch.rand(1, generator=moved)
    with pytest.raises(ev.CheckpointError, match="random numbers is"):
        ev.eigsh(hidden(flat()), k=2, checkpoint=file, generator=moved)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run"
    ev.eigsh(hidden(flat()), k=2, checkpoint=file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ev.CheckpointError, match=r"cannot be read.*Delete it"):
        ev.eigsh(hidden(flat()), k=2, checkpoint=file)
    with pytest.raises(ev.CheckpointError, match="the folder does not exist"):
        ev.eigsh(hidden(flat()), k=2, checkpoint=tmp_path / "no" / "run")
    assert [each.name for each in tmp_path.iterdir()] == ["run"], "nothing half-written is left"


def test_a_dense_operator_hides_nothing() -> None:
    M = torch.randn(300, 300, generator=draw(0), dtype=D)
    truth = torch.linalg.eigvalsh(M + M.T)
    for op in (ev.from_dense(M + M.T), matrix(M + M.T)):
        assert torch.allclose(ev.eigsh(op, k=3, tol=1e-6).values, ends(truth, 3), rtol=1e-6)
