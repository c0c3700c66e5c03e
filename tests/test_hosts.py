"""How an address is written: what we print of one is what its reader can give to a flag."""

import pytest

from yeto.hosts import with_port
from yeto.link import Dialler, LinkClosed
from yeto.link.dial import parse_address


@pytest.mark.parametrize("host", ["127.0.0.1", "head.example", "::1", "2001:db8::7"])
def test_an_address_that_we_write_is_one_that_we_read(host):
    assert parse_address(with_port(host, 29400)) == (host, 29400)


async def test_a_syncer_that_is_not_there_is_named_as_it_is_dialled():
    with pytest.raises(LinkClosed, match=r"^cannot connect to \[::1\]:1: "):
        await Dialler("::1", 1).open()
