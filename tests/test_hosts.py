"""How an address is written: what we print of one is what its reader can give to a flag."""

import pytest

from yeto.errors import ConfigError
from yeto.hosts import with_port
from yeto.link import Dialler, LinkClosed
from yeto.link.dial import Target, parse_address
from yeto.syncer import app
from yeto.view import serving


@pytest.mark.parametrize("host", ["127.0.0.1", "head.example", "::1", "2001:db8::7"])
def test_an_address_that_we_write_is_one_that_we_read(host):
    assert parse_address(with_port(host, 29400)) == (host, 29400)


async def test_a_syncer_that_is_not_there_is_named_as_it_is_dialled():
    with pytest.raises(LinkClosed, match=r"^cannot connect to \[::1\]:1: "):
        await Dialler("::1", 1).open()


async def test_a_name_that_no_machine_can_have_is_a_wrong_flag_where_it_is_listened_on_and_dialled():
    name = "\u0663"
    with pytest.raises(ConfigError, match=f"--host {name} --port 0: cannot listen there"):
        await app.listen(name, 0)
    with pytest.raises(ConfigError, match=f"--http-host {name} --http-port 0: cannot listen there"):
        await serving.listen(name, 0, host_flag="--http-host", port_flag="--http-port")
    with pytest.raises(ConfigError, match=f"--syncer {name}:1: '{name}' cannot be a name of a machine"):
        Target.parse(f"{name}:1")
