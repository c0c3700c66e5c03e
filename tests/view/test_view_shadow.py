"""The shadow says of every moment what the coordinator itself says, its sentence included."""

import pytest
from view_tapes import TAPES, differences, replayed

from yeto.core import Phase
from yeto.view.shadow import Shadow


@pytest.mark.parametrize("path", TAPES, ids=lambda path: path.stem)
def test_after_every_event_of_a_recorded_run(path):
    shadow, compared = Shadow(), 0
    for record, replayer in replayed(path):
        shadow.feed(record)
        if replayer.due == 0:
            found = differences(replayer.state, shadow)
            assert not found, f"record {record.seq}, {record.kind}: {found}"
            compared += 1
    assert compared > 60
    assert shadow.phase is Phase.ENDED
