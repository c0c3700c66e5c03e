"""The best plan: against every plan there is, by rules written down a second time."""

import ctypes
import itertools
import random
import sys
from decimal import Decimal
from fractions import Fraction

import pytest
import scipy.optimize

from yeto.errors import ConfigError, YetoError
from yeto.fleet.gpus import gpu_of
from yeto.fleet.grammar import join_islands, parse_islands
from yeto.fleet.memory import Training
from yeto.fleet.models import ModelSize, model_size
from yeto.fleet.offers import Offer
from yeto.fleet.plan import make_plan
from yeto.fleet.shapes import Limits
from yeto.fleet.solve import Row, choose, least
from yeto.fleet.streams import stdout_to_stderr

SMALL = Training(
    model=ModelSize(name="m", hf_id="m", weights_gb=16, active_gb=16, hidden_size=4096, source="the test")
)
PEAK = {"L4": 121, "A10G": 125, "L40S": 362, "A100": 312, "A100-80GB": 312, "H100": 989}
MEMORY = {"L4": 24, "A10G": 24, "L40S": 48, "A100": 40, "A100-80GB": 80, "H100": 80}


def offer(cloud="aws", region="r1", gpu="A100", count=8, price="10", **more):
    return Offer(
        **{"cloud": cloud, "region": region, "gpu": gpu_of(gpu), "count": count, "price": Decimal(price)}
        | {"is_spot": True}
        | more
    )


def random_offers(draw):
    """Return few offers in few places; in half of the markets prices are the same everywhere: plans tie."""
    listed = draw.random() < 0.5
    listing = {gpu: draw.randint(1, 6) for gpu in PEAK}
    gpus = draw.sample(list(PEAK), 2) if listed else PEAK
    kinds = draw.sample(list(itertools.product(("aws", "gcp"), ("a", "b"), gpus, (1, 8))), draw.randint(2, 5))
    quotas = {}
    offers = []
    for cloud, region, gpu, count in kinds:
        quota = quotas.setdefault((cloud, region, gpu), draw.choice([None, 4, 8, 16, 24]))
        offers.append(
            offer(
                *(cloud, region, gpu, count),
                str(Decimal(listing[gpu] if listed else draw.randint(1, 24)) * count / 4),
                quota=quota,
                score=None if listed else draw.choice([None, Decimal(7), Decimal("9.75")]),
                is_spot=draw.random() < 0.8,
            )
        )
    return offers


def all_plans(offers, limits):
    """Yield (counts, value, cost) of every plan that keeps the limits; rules as the sheet has them."""
    columns = []
    for one in sorted(offers, key=lambda o: (o.cloud, o.region, o.gpu.name, o.count)):
        name = one.gpu.name
        factor = 1 + 8 * 2 * 16 / 4096
        nodes = next(n for n in range(1, 9) if 16 / (n * one.count) * factor + 8 <= 0.92 * MEMORY[name])
        rdma = one.count == 8 and name in {"aws": ("A100", "A100-80GB", "H100"), "gcp": ()}[one.cloud]
        share = Fraction(35 if nodes == 1 else 30 if rdma else 20, 100)
        here = (
            Fraction(85, 100)
            if one.score is None
            else min(Fraction(98, 100), Fraction(1, 2) + Fraction(1, 20) * Fraction(one.score))
        )
        columns.append((one, nodes, nodes * one.count * PEAK[name] * share * here, nodes * one.price))
    most = limits.max_islands if limits.max_per_offer is None else limits.max_per_offer
    for counts in itertools.product(range(most + 1), repeat=len(columns)):
        if not 1 <= sum(counts) <= limits.max_islands:
            continue
        used, cost, value = {}, Fraction(2, 5), Fraction(0)
        for count, (one, nodes, speed, price) in zip(counts, columns, strict=True):
            if count:
                key = (one.cloud, one.region, one.gpu.name)
                used[key] = used.get(key, 0) + count * nodes * one.count
                cost += count * Fraction(price) * Fraction(115, 100)
                value += count * speed
                if one.quota is not None and used[key] > one.quota:
                    break
        else:
            if limits.budget is not None and cost > limits.budget:
                continue
            if limits.flops is not None and value < limits.flops:
                continue
            yield counts, value, cost


def preference(limits):
    """Return the order of plans, best first: it has no ties."""

    def key(plan):
        counts, value, cost = plan
        first = (-value, cost) if limits.budget is not None else (cost, -value)
        return (*first, sum(counts), tuple(-count for count in counts))

    return key


def test_200_small_markets_give_the_one_best_of_all_plans():
    draw = random.Random(20261201)
    found = ties = 0
    for _ in range(200):
        offers = random_offers(draw)
        bound = {"budget": Fraction(draw.randint(2, 60))}
        if draw.random() < 0.5:
            bound = {"flops": Fraction(draw.randint(1, 4000))}
        most = draw.choice([None, None, 1, 2])
        limits = Limits(**bound, max_islands=draw.randint(1, 3), max_per_offer=most)
        plans = sorted(all_plans(offers, limits), key=preference(limits))
        draw.shuffle(offers)
        answer = make_plan(SMALL, offers, limits)
        if not plans:
            assert answer.plan is None, (offers, limits)
            assert answer.why_none
            continue
        found += 1
        counts, value, cost = plans[0]
        ties += len(plans) > 1 and plans[1][1:] == (value, cost)
        assert answer.plan is not None, (offers, limits)
        assert (answer.plan.tflops, answer.plan.cost) == (value, cost), (offers, limits)
        wanted = sorted(offers, key=lambda o: (o.cloud, o.region, o.gpu.name, o.count))
        have = {part.shape.offer: part.islands for part in answer.plan.parts}
        assert tuple(have.get(one, 0) for one in wanted) == counts, (offers, limits)
    # Else this would prove little.
    assert found > 100
    assert ties > 10


def test_a_plan_does_not_depend_on_the_order_of_the_offers():
    offers = [offer(region=f"r{number}", gpu=gpu) for number in range(4) for gpu in ("A100", "H100")]
    limits = Limits(budget=Fraction(60))
    plans = set()
    for seed in range(5):
        random.Random(seed).shuffle(offers)
        plan = make_plan(SMALL, offers, limits).plan
        plans.add(join_islands(plan.islands))
    # Every region costs the same: the first in the order takes all.
    assert plans == {",".join(["aws:8xh100@r0"] * 5)}
    assert parse_islands(plans.pop()) == plan.islands


def test_a_limit_binds_when_there_is_a_better_plan_without_it():
    h100 = offer(gpu="H100", quota=16)
    a100 = offer(gpu="A100", price="4")

    def binding(**limits):
        return make_plan(SMALL, [h100, a100], Limits(**limits)).plan.binding

    assert binding(budget=Fraction(1000)) == (
        "--max-islands: 16 of 16",
        "quota of H100 at aws r1: 16 of 16 accelerators",
    )
    assert binding(budget=Fraction(24)) == ("--budget: $23.40 of $24.00 an hour",)
    assert binding(budget=Fraction(1000), max_islands=1) == (
        # With more islands there would be more; with a larger quota, still one.
        "--max-islands: 1 of 1",
    )
    assert binding(budget=Fraction(1000), max_per_offer=1) == ("--max-per-offer: 1",)
    assert binding(flops=Fraction(100)) == ("--flops: 100.0 TFLOPS are wanted",)
    # An island that is too dear alone is what the budget keeps out.
    assert binding(budget=Fraction(6), max_islands=1) == ("--budget: $5.00 of $6.00 an hour",)


def test_offers_of_a_bucket_share_the_quota_that_one_of_them_says():
    both = [offer(quota=8, count=8), offer(quota=None, count=4, price="4")]
    plan = make_plan(SMALL, both, Limits(budget=Fraction(1000))).plan
    assert sum(island.ranks for island in plan.islands) == 8


def test_every_shape_that_is_turned_away_says_why():
    offers = [
        offer(gpu="T4"),
        offer(gpu="A100", quota=7),
        offer(gpu="L4", count=1, price="0.5", host_memory_gb=0.1),
        offer(gpu="H100", price="600"),
        offer(gpu="H200"),
    ]
    answer = make_plan(SMALL, offers, Limits(budget=Fraction(100)))
    assert [(str(one.island), one.reason) for one in answer.rejected] == [
        ("aws:8xa100@r1", "quota: 7 accelerators, and an island takes 8"),
        ("aws:8xh100@r1", "price: $690.00 an hour with margin and $0.40 for the head: over --budget"),
        ("aws:1xl4@r1", "memory: 16.0 / 1 * 1.062 + 2 + 6 = 25.0 GB a GPU > 22.1 (92% of 24)"),
        ("aws:2x1xl4@r1", "host memory: anchors and copies take 1.0 GB, and a machine has 0.1 GB"),
        ("aws:8xt4@r1", "T4 has no bf16"),
    ]
    assert [str(shape.island) for shape in answer.shapes] == ["aws:8xh200@r1"]


def test_a_model_of_284_billion_parameters_takes_sixteen_accelerators_of_80_gb():
    training = Training(model=model_size("deepseek4flash"))
    offers = [offer(gpu="A100", quota=8), offer(gpu="A100-80GB"), offer(gpu="H100", cloud="runpod")]
    answer = make_plan(training, offers, Limits(budget=Fraction(500)))
    assert answer.plan is not None
    assert min(island.ranks for island in answer.plan.islands) >= 16
    refused = {str(one.island): one.reason for one in answer.rejected}
    assert refused["aws:8xa100@r1"] == "memory: 568.0 / 8 * 1.003 + 2 + 6 = 79.2 GB a GPU > 36.8 (92% of 40)"
    assert refused["aws:8xa100-80gb@r1"].endswith("= 79.2 GB a GPU > 73.6 (92% of 80)")
    only = make_plan(training, offers[:1], Limits(budget=Fraction(500)))
    assert only.plan is None
    assert only.why_none == "no offer makes an island within the limits; each one's reason is in the list"


def test_a_speed_that_cannot_be_had_says_what_can():
    answer = make_plan(SMALL, [offer(quota=16)], Limits(flops=Fraction(5000)))
    assert answer.plan is None
    # Two islands of 8 x 312 x .35 x .85.
    assert answer.why_none == "at most 1,485.1 TFLOPS can be had, and --flops wants 5,000.0"


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({}, "say one of --budget"),
        ({"budget": Fraction(1), "flops": Fraction(1)}, "say one of --budget"),
        ({"budget": Fraction(1), "max_islands": 0}, "--max-islands 0: must be from 1 to 256"),
        ({"budget": Fraction(1), "max_islands": 257}, "--max-islands 257"),
        ({"budget": Fraction(1), "max_per_offer": 0}, "--max-per-offer 0"),
    ],
)
def test_impossible_limits_are_refused(limits, words):
    with pytest.raises(ConfigError, match=words):
        make_plan(SMALL, [offer()], Limits(**limits))


def test_the_solver_keeps_limits_to_the_unit_however_large_they_are():
    big = 10**9
    rows = [Row(coefficients=(big, big + 1), high=3 * big + 2)]
    # 3 of the second would be one unit over.
    assert choose([3, 3], rows, [[-1, -1], [0, -1]]) == (1, 2)
    assert choose([3, 3], [Row(coefficients=(2, 4), low=5, high=5)], [[1, 1]]) is None
    assert least([3, 3], [Row(coefficients=(2, 4), low=5)], [10, 30]) == 30
    assert choose([], [], []) == ()
    assert choose([], [Row(coefficients=(), low=1)], []) is None


def test_an_answer_that_breaks_a_limit_is_not_believed(monkeypatch):
    real = scipy.optimize.milp

    def bent(*words, **more):
        answer = real(*words, **more)
        answer.x = answer.x + 1
        return answer

    monkeypatch.setattr(scipy.optimize, "milp", bent)
    with pytest.raises(YetoError, match="not exact"):
        least([1], [Row(coefficients=(1,), high=1)], [-1])


def test_lines_that_the_solver_prints_are_not_in_the_way_of_json(capfd):
    libc = ctypes.CDLL(None)
    print("before", flush=True)
    with stdout_to_stderr():
        # As HiGHS does: through the C library, which keeps it back.
        libc.puts(b"solving")
    print("after", flush=True)
    libc.fflush(None)
    assert capfd.readouterr() == ("before\nafter\n", "solving\n")


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ConfigError, match=r"pip install 'yeto\[fleet\]'"):
        least([1], [], [1])
