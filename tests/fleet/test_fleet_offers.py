"""Offers: files are read strictly, and SkyPilot's catalogue becomes the same."""

import math
import os
import sys
import types
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import pytest

from yeto.errors import ConfigError, YetoError
from yeto.fleet.catalogue import catalogue_offers, offers_of
from yeto.fleet.offers import read_offers

HEADER = "cloud,region,gpu,count,price,spot,quota,score"


@pytest.fixture
def read(tmp_path):
    def run(*lines, header=HEADER):
        path = tmp_path / "offers.csv"
        path.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
        return read_offers(path)

    return run


def test_a_file_is_read_in_a_fixed_order_whatever_its_own(read):
    lines = [
        "runpod,CA,H100,8,16.5,true,,",
        "AWS,us-east-2,a100-80gb,8,12.30001,yes,32,7.25",
        "aws,,l4,1,.3,0,8,",
    ]
    offers = read(*lines)
    assert read(*reversed(lines)) == offers
    first, second, third = offers
    assert (first.cloud, first.region, first.gpu.name, first.is_spot, first.quota) == (
        "aws",
        None,
        "L4",
        False,
        8,
    )
    # Rounded up: a plan never costs more than it says.
    assert (second.price, second.score) == (Decimal("12.3001"), Decimal("7.25"))
    assert (third.quota, third.score, third.host_memory_gb) == (None, None, None)


def test_columns_may_stand_in_any_order_and_blank_lines_are_no_offers(read):
    (one,) = read(
        "512, 8 ,a100,aws,10,true,us-east-1,,4",
        "",
        ",,,,,,,,",
        header="host_memory,count,gpu,cloud,price,spot,region,quota,score",
    )
    assert (one.host_memory_gb, one.count, one.region, one.score) == (512.0, 8, "us-east-1", Decimal(4))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("moon,r,a100,8,10,true,,", "line 2, cloud 'moon': no known cloud; known are aws"),
        ("local,r,a100,8,10,true,,", "line 2, cloud 'local'"),
        ("aws,r s,a100,8,10,true,,", "line 2, region 'r s'"),
        ("aws,r,z900,8,10,true,,", "line 2, gpu 'z900' is no known accelerator"),
        ("aws,r,cpu,8,10,true,,", "line 2, gpu 'cpu'"),
        ("aws,r,a100,0,10,true,,", "line 2, count '0': must be a whole number from 1 to 64"),
        ("aws,r,a100,8.0,10,true,,", "line 2, count '8.0'"),
        ("aws,r,a100,8,,true,,", "line 2, price ''"),
        ("aws,r,a100,8,nan,true,,", "line 2, price 'nan': must be a number from 0 to 100000"),
        ("aws,r,a100,8,-1,true,,", "line 2, price '-1'"),
        ("aws,r,a100,8,0,true,,", "line 2, price '0': must be above 0"),
        ("aws,r,a100,8,1e999999999,true,,", "line 2, price"),
        ("aws,r,a100,8,10,maybe,,", "line 2, spot 'maybe': say true or false"),
        ("aws,r,a100,8,10,true,-1,", "line 2, quota '-1'"),
        ("aws,r,a100,8,10,true,,11", "line 2, score '11': must be a number from 1 to 10"),
        ("aws,r,a100,8,10,true,,0", "line 2, score '0'"),
        # What Python takes for a number, and a person for a slip.
        ("aws,r,a100,8,1_0,true,,", "line 2, price '1_0'"),
        ("aws,r,a100,8,\uff11\uff10,true,,", "line 2, price"),
        ("aws,r,a100,8,.,true,,", "line 2, price '.'"),
        ("aws,r,a100,8,10,true,", "line 2: has 7 columns, and the first line 8"),
    ],
)
def test_a_wrong_line_is_named_with_its_column(read, line, words):
    with pytest.raises(ConfigError, match="--offers") as caught:
        read(line)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_all_wrong_lines_are_named_at_once(read):
    bad = ["aws,r,a100,8,free,true,,"] * 12
    with pytest.raises(ConfigError) as caught:
        read("aws,r,h100,8,10,true,,", *bad)
    assert "line 3, price" in str(caught.value)
    assert "line 12, price" in str(caught.value)
    assert str(caught.value).endswith("and 2 more")


def test_lines_that_contradict_each_other_are_named(read):
    with pytest.raises(ConfigError, match="line 3: is the offer of line 2 again"):
        read("aws,r,a100,8,10,true,,", "aws,r,A100,8,11,true,,")
    with pytest.raises(ConfigError, match="line 3, quota '16': line 2 says 8 for the same cloud, region"):
        read("aws,r,a100,8,10,true,8,", "aws,r,a100,4,5,true,16,")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (HEADER.encode(), "has no offers"),
        (b"cloud,region,gpu,count,price,spot,quota\n", "no column score"),
        (HEADER.encode() + b",size\n", "an unknown column 'size'"),
        (HEADER.encode() + b",spot\n", "a column twice"),
        (b"\xff\xfe\x00", "no CSV in UTF-8"),
        (HEADER.encode() + b'\n"aws', "no CSV in UTF-8"),
        (b"x" * (5 << 20), "has more than"),
    ],
)
def test_a_file_that_is_no_list_of_offers_is_refused(tmp_path, text, words):
    path = tmp_path / "offers.csv"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=words):
        read_offers(path)


@pytest.mark.timeout(60)
def test_a_file_without_an_end_is_refused():
    with pytest.raises(ConfigError, match="/dev/zero: has more than"):
        read_offers(Path("/dev/zero"))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.csv: No such file"):
        read_offers(tmp_path / "nowhere.csv")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_offers(tmp_path)


def test_the_sample_is_read(fixtures):
    (path,) = (fixtures / "offers").glob("sample-????-??-??.csv")
    offers = read_offers(path)
    assert {offer.gpu.name for offer in offers} >= {"T4", "V100", "A100", "H100", "B200"}


class Info(NamedTuple):
    """An entry of the catalogue, with the fields of SkyPilot's own."""

    cloud: str
    instance_type: str | None
    accelerator_name: str
    accelerator_count: float
    cpu_count: float | None
    device_memory: float | None
    memory: float | None
    price: float
    spot_price: float
    region: str


def info(**more):
    return Info(
        **{"cloud": "AWS", "instance_type": "p4d.24xlarge", "accelerator_name": "A100"}
        | {"accelerator_count": 8.0, "cpu_count": 96.0, "device_memory": None, "memory": 1152.0}
        | {"price": 32.7726, "spot_price": 11.2448, "region": "us-east-1"}
        | more
    )


def test_an_entry_of_the_catalogue_is_an_offer_on_demand_and_a_spot_one():
    spot, on_demand = offers_of([info()])
    assert (spot.is_spot, spot.price) == (True, Decimal("11.2448"))
    assert (on_demand.is_spot, on_demand.price) == (False, Decimal("32.7726"))
    assert (spot.cloud, spot.region, spot.count, spot.quota, spot.score) == (
        "aws",
        "us-east-1",
        8,
        None,
        None,
    )
    # GiB there, GB here.
    assert spot.host_memory_gb == pytest.approx(1236.95, abs=0.01)


def test_of_machines_alike_the_cheapest_counts_and_what_cannot_be_planned_is_none():
    offers = offers_of(
        [
            info(spot_price=12.0, instance_type="dear"),
            info(spot_price=11.0, price=math.nan),
            info(accelerator_name="TPU-V5"),
            info(accelerator_count=0.5),
            info(accelerator_count=None),
            info(region="us east"),
            info(cloud="Moon"),
            info(spot_price=math.nan, price=0.0, region="us-west-1"),
            info(spot_price=math.nan, memory=None, region="us-west-2"),
        ]
    )
    assert [(offer.region, offer.is_spot, offer.price) for offer in offers] == [
        ("us-east-1", True, Decimal(11)),
        ("us-east-1", False, Decimal("32.7726")),
        ("us-west-2", False, Decimal("32.7726")),
    ]
    assert offers[-1].host_memory_gb is None


def catalogue(monkeypatch, list_accelerators):
    """Put a package of SkyPilot's name in place, whose catalogue is a function."""
    module = types.ModuleType("sky")
    module.catalog = types.SimpleNamespace(list_accelerators=list_accelerators)
    monkeypatch.setitem(sys.modules, "sky", module)


def test_a_cloud_whose_catalogue_cannot_be_had_is_named_and_the_others_count(monkeypatch, capfd):
    def list_accelerators(*, gpus_only, clouds, all_regions):
        assert gpus_only
        assert all_regions
        # As a logger does that keeps the stream of the process.
        os.write(1, b"fetching\n")
        if clouds == "aws":
            return {"A100": [info()]}
        if clouds == "gcp":
            raise ConnectionError("no route\nto host")
        return {}

    catalogue(monkeypatch, list_accelerators)
    offers, missing = catalogue_offers()
    assert [offer.cloud for offer in offers] == ["aws", "aws"]
    assert missing == {"gcp": "ConnectionError: no route to host"}
    # What it prints is not in the way of --json.
    out, err = capfd.readouterr()
    assert out == ""
    assert "fetching" in err


def test_no_catalogue_at_all_says_what_to_do(monkeypatch):
    def list_accelerators(**_):
        raise OSError("away")

    catalogue(monkeypatch, list_accelerators)
    with pytest.raises(YetoError, match=r"gives no offers \(aws: OSError: away\); name a file with --offers"):
        catalogue_offers()
    monkeypatch.setitem(sys.modules, "sky", None)
    with pytest.raises(ConfigError, match=r"name a file with --offers, or pip install 'yeto\[fleet\]'"):
        catalogue_offers()
