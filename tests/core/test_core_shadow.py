"""What a view makes of a session is what the coordinator says of it, after every event of every script."""

import pytest
from script import run_script
from view_tapes import ROOT, differences, stepped

from yeto.view.shadow import Shadow

SCRIPTS = sorted((ROOT / "fixtures" / "scripts").glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_shadow_of_a_scripted_session(path):
    for session in run_script(path.read_bytes().decode(), path.name)[1]:
        shadow = Shadow()
        for record, state in stepped(session):
            shadow.feed(record)
            if state is not None:
                found = differences(state, shadow)
                assert not found, f"record {record.seq}, {record.kind}: {found}"
