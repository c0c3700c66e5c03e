"""From snapshot to wire bytes: the part of an answer that is done beside training.

``d = local - anchor``, plus the residual that earlier quantised pushes are still owed, in the session dtype.
Plain numpy on purpose: it works in one thread, whereas torch would take cores from the training step.
"""

from __future__ import annotations

import numpy as np

from yeto.learner.mailbox import Push
from yeto.wire import codecs
from yeto.wire.messages import PushHeader


def encode_push(push: Push, learner_id: int, dtype: str) -> tuple[PushHeader, bytes]:
    """Return the head and the tensor bytes of a push; blocks, so it belongs into a worker thread.

    With error feedback it also fills the residual that this push leaves behind, and where work is carried,
    what the syncer will read. Pushes of a fragment must be encoded in the order they were answered.

    Args:
        push: the answer and its snapshot, which is used up.
        learner_id: stated in the head.
        dtype: session dtype.
    """
    answer = push.answer
    delta = push.snapshot.values()
    np.subtract(delta, answer.anchor, out=delta)
    carried = None if answer.carried is None else answer.carried.values()
    if carried is not None:
        delta += carried
    codec = codecs.by_name(dtype)
    payload = codec.encode(delta)
    # A delta that is not finite is refused by the syncer; fed back, it would spoil all later ones.
    if (answer.leaves is not None or answer.sent is not None) and np.isfinite(delta).all():
        read = codec.decode(payload, delta.size)
        if answer.sent is not None:
            answer.sent.fill(read)
        if answer.leaves is not None:
            np.subtract(delta, read, out=read)
            read *= np.float32(answer.residual_scale)
            answer.leaves.fill(read)
    head = PushHeader(
        learner=learner_id,
        fragment=answer.pull.fragment,
        step=answer.pull.step,
        attempt=answer.pull.attempt,
        base_version=answer.base_version,
        local_step=answer.local_step,
        c_steps=answer.c_steps,
        c_tokens=answer.c_tokens,
    )
    return head, payload
