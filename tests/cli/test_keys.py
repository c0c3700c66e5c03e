"""``yeto keys new``: files that nobody else can read, never overwritten, and certificates that work."""

import ipaddress
import re
import stat
import sys

import pytest
import trio
from cryptography import x509

from yeto.cli.main import main
from yeto.cli.run_learner import LearnerFlags
from yeto.cli.run_syncer import SyncerFlags
from yeto.link import LinkRefused, client_context, server_context
from yeto.link.tls import accept_tls, connect_tls


@pytest.fixture
def keys_new(tmp_path, monkeypatch, capsys):
    """Run the command in an empty folder; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        with pytest.raises(SystemExit) as end:
            main(["keys", "new", *words])
        said = capsys.readouterr()
        return end.value.code or 0, said.out, said.err

    return run


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_key(keys_new, tmp_path):
    code, out, _ = keys_new()
    key = tmp_path / "yeto.key"
    assert code == 0
    assert "yeto.key (mode 0600)" in out
    assert re.fullmatch(r"[0-9a-f]{64}\n", key.read_text())
    assert mode(key) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["yeto.key"]


def test_nothing_is_overwritten_and_nothing_half_written(keys_new, tmp_path):
    """One file of the set exists: none of the others is left behind."""
    (tmp_path / "b-learner-1.pem").write_text("precious")
    code, _, err = keys_new("b.key", "--tls", "localhost", "--tls-clients", "2")
    assert (code, err) == (2, "yeto: b-learner-1.pem exists already; name another file or remove it first\n")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"b-learner-1.pem": "precious"}
    code, _, err = keys_new("nowhere/yeto.key", "--tls", "localhost")
    assert (code, err) == (2, "yeto: cannot write nowhere/yeto.key: No such file or directory\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tls", "head:29400"], "'head:29400' is neither a host name nor an address"),
        (["--tls", "10.0.0.300"], "'10.0.0.300' is neither"),
        (["--tls", ""], "--tls is empty"),
        (["--tls", "a,,b"], "'' is neither"),
        (["--tls", "a b"], "'a b' is neither"),
        (["--tls=-a"], "'-a' is neither"),
        (["--tls", "x" * 64], "is neither"),
        (["--tls", "höst"], "is neither"),
        (["--tls-clients", "2"], "--tls-clients: needs --tls HOST"),
        (["--tls", "a", "--tls-days", "0"], "--tls-days 0: must be at least 1 (see yeto keys new --help)"),
        (["--tls", "a", "--tls-days", "99999999"], "--tls-days 99999999: must be at most 36500"),
        (["--tls-clients", "-1"], "--tls-clients -1: must be at least 0"),
    ],
)
def test_what_cannot_be_made(keys_new, tmp_path, words, told):
    code, _, err = keys_new(*words)
    assert code == 2
    assert told in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_without_the_library_the_remedy_is_named(keys_new, monkeypatch, tmp_path):
    for name in list(sys.modules):
        if name == "yeto.cli.certificates" or name.split(".")[0] == "cryptography":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    code, _, err = keys_new("--tls", "localhost")
    assert code == 2
    assert "cryptography, which is not installed: pip install 'yeto[tls]'" in err
    assert not list(tmp_path.iterdir())
    assert keys_new()[0] == 0


async def shake_hands(server, client, name):
    """Return what the learner says of a handshake over loopback; None when it went well."""
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, trio.open_nursery() as nursery:
        said = []

        async def accept():
            async with await listener.accept() as raw:
                try:
                    stream = await accept_tls(raw, server)
                    await stream.receive_some()
                except LinkRefused:
                    pass

        nursery.start_soon(accept)
        async with await trio.open_tcp_stream(*listener.socket.getsockname()) as raw:
            try:
                await connect_tls(raw, client, name)
            except LinkRefused as error:
                said.append(str(error))
    return said[0] if said else None


async def test_the_certificates_are_good_for_every_name_and_for_no_other(keys_new, tmp_path):
    code, out, _ = keys_new(
        "f.key", "--tls", "head.example,*.spot.example,203.0.113.7,::1", "--tls-clients", "2"
    )
    assert code == 0
    names = {path.name: mode(path) for path in tmp_path.iterdir()}
    secret = {"f.key", "f-syncer-key.pem", "f-learner-0-key.pem", "f-learner-1-key.pem"}
    public = {"f-ca.pem", "f-syncer.pem", "f-learner-0.pem", "f-learner-1.pem"}
    assert set(names) == secret | public
    assert {names[name] for name in secret} == {0o600}
    for name in ("f-syncer.pem", "f-syncer-key.pem", "f-ca.pem", "f-learner-N.pem", "f-learner-N-key.pem"):
        assert name in out
    server = server_context(tmp_path / "f-syncer.pem", tmp_path / "f-syncer-key.pem", tmp_path / "f-ca.pem")
    client = client_context(
        tmp_path / "f-ca.pem", tmp_path / "f-learner-1.pem", tmp_path / "f-learner-1-key.pem"
    )
    for name in ("head.example", "a.spot.example", "203.0.113.7", "::1"):
        assert await shake_hands(server, client, name) is None
    for name in ("head.example.org", "spot.example", "203.0.113.8", "localhost"):
        assert "is not accepted" in await shake_hands(server, client, name)


def test_what_the_certificates_say(keys_new, tmp_path):
    """What strict verifiers ask for is there, and nobody can sign with what is on disk."""
    keys_new("--tls", "head.example,::1", "--tls-clients", "1", "--tls-days", "10")
    ca, syncer, learner = (
        x509.load_pem_x509_certificate((tmp_path / f"yeto-{name}.pem").read_bytes())
        for name in ("ca", "syncer", "learner-0")
    )
    for cert in (ca, syncer, learner):
        cert.verify_directly_issued_by(ca)
        assert 10 <= (cert.not_valid_after_utc - cert.not_valid_before_utc).days <= 11
        constraints = cert.extensions.get_extension_for_class(x509.BasicConstraints)
        assert constraints.critical
        assert constraints.value.ca == (cert is ca)
        assert cert.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier)
    names = syncer.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["head.example"]
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("::1")]
    purposes = [
        [purpose._name for purpose in cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value]
        for cert in (syncer, learner)
    ]
    assert purposes == [["serverAuth"], ["clientAuth"]]
    assert not list(tmp_path.glob("*ca-key*"))


async def test_a_learner_s_certificate_is_no_syncer_s(keys_new, tmp_path):
    """A learner that turns malicious cannot stand in for the syncer."""
    keys_new("--tls", "localhost", "--tls-clients", "1")
    with pytest.raises(Exception, match="unsuitable certificate purpose"):
        server_context(tmp_path / "yeto-learner-0.pem", tmp_path / "yeto-learner-0-key.pem")


@pytest.mark.parametrize(
    ("hosts", "line"),
    [
        (
            "my-run,10.0.0.1",
            "(where no network knows my-run: --syncer ADDRESS:29400 --tls-server-name my-run)",
        ),
        ("10.0.0.1,my-run", "--tls-ca"),
    ],
)
def test_a_name_that_only_the_certificate_knows_needs_one_flag_more(keys_new, hosts, line):
    _, out, _ = keys_new("--tls", hosts)
    assert line in out.splitlines()[-1]


def test_the_printed_flags_are_the_ones_that_both_sides_take(keys_new, tmp_path):
    _, out, _ = keys_new("--tls", "localhost", "--tls-clients", "1")
    printed = set(re.findall(r"--(tls-[a-z-]+|auth-key-file)", out))
    for flags in (SyncerFlags, LearnerFlags):
        known = {field.name.replace("_", "-") for field in flags.__attrs_attrs__}
        assert printed & known >= {"auth-key-file", "tls-cert", "tls-key"}
    syncer = SyncerFlags(
        learners=2,
        total_steps=1,
        host="0.0.0.0",
        auth_key_file=tmp_path / "yeto.key",
        tls_cert=tmp_path / "yeto-syncer.pem",
        tls_key=tmp_path / "yeto-syncer-key.pem",
        tls_client_ca=tmp_path / "yeto-ca.pem",
    ).config()
    learner = LearnerFlags(
        syncer="localhost:1",
        model="m",
        data="d",
        tls_ca=tmp_path / "yeto-ca.pem",
        tls_cert=tmp_path / "yeto-learner-0.pem",
        tls_key=tmp_path / "yeto-learner-0-key.pem",
    ).learner_config()
    assert syncer.tls is not None
    assert learner.tls is not None
    assert "TlsContext" not in repr(syncer) + repr(learner)
