"""The fit finds what the steps cost, and one odd step does not mislead it."""

import random

import pytest

from legato.engine.cost_model import CallCost


def truth(n: int, depth: float) -> float:
    return 4 + 1.5 * n + 0.4 * n * depth / 1024


def trained(steps: int = 600, noise: float = 0.0, outliers: float = 0.0) -> CallCost:
    rng = random.Random(1)
    cost = CallCost()
    for _ in range(steps):
        n, depth = rng.randint(2, 128), rng.uniform(0, 4000)
        took = truth(n, depth) * rng.uniform(1 - noise, 1 + noise)
        cost.learn(n, depth, took * 20 if rng.random() < outliers else took)
    return cost


@pytest.mark.parametrize("n, depth", [(2, 0), (16, 100), (64, 3000), (128, 4000)])
def test_it_predicts_what_it_has_learned(n: int, depth: float) -> None:
    assert trained().predict_ms(n, depth) == pytest.approx(truth(n, depth), rel=0.05, abs=1)
    assert trained(noise=0.2).predict_ms(n, depth) == pytest.approx(truth(n, depth), rel=0.35, abs=4)


def test_one_outlier_does_not_mislead_it() -> None:
    cost = trained(noise=0.1)
    before = cost.predict_ms(32, 500)
    cost.learn(32, 500, 5000)
    assert cost.predict_ms(32, 500) < before * 1.6


def test_some_outliers_leave_it_near_the_truth() -> None:
    assert trained(steps=1200, outliers=0.05).predict_ms(64, 1000) == pytest.approx(truth(64, 1000), rel=0.35)


def test_a_slower_machine_is_followed() -> None:
    cost = trained()
    rng = random.Random(2)
    for _ in range(240):
        n, depth = rng.randint(2, 128), rng.uniform(0, 4000)
        cost.learn(n, depth, truth(n, depth) * 3)
    assert cost.predict_ms(64, 1000) == pytest.approx(3 * truth(64, 1000), rel=0.2)


def test_the_largest_call_within_a_budget_fits_it_and_one_more_does_not() -> None:
    cost = trained()
    for budget in (19.3, 88.1, 251.0):
        for depth in (0.0, 3000.0):
            n = cost.largest(budget, depth)
            assert cost.predict_ms(n, depth) <= budget + 1e-6 < cost.predict_ms(n + 1, depth)
    assert cost.largest(1.0, 0) == 0


def test_steps_of_one_size_keep_it_sane() -> None:
    """The same call for ever says nothing of other sizes; the fit must not drift meanwhile."""
    cost = CallCost()
    rng = random.Random(3)
    for _ in range(5000):
        cost.learn(16, 1000, truth(16, 1000) * rng.uniform(0.9, 1.1))
    assert cost.predict_ms(16, 1000) == pytest.approx(truth(16, 1000), rel=0.15)
    assert cost.predict_ms(128, 1000) < truth(128, 1000) * 4
    assert cost.predict_ms(128, 1000) > cost.predict_ms(16, 1000) * 0.99


def test_any_run_of_calls_leaves_it_finite() -> None:
    """Thousands of nearly equal calls, odd sizes, zeros and giants between them."""
    rng = random.Random(4)
    cost = CallCost()
    for i in range(20_000):
        n = 8 if i % 50 else rng.choice([2, 1, 512])
        cost.learn(n, rng.choice([0, 24, 25, 8000]), rng.choice([0.0, 1e-3, 40.0, 41.0, 1e5]))
        assert 0 <= cost.predict_ms(512, 8000) < 1e9
        assert cost.largest(88.0, 30) >= 0
