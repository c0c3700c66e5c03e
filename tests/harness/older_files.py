"""A writer of the older single-file checkpoints, byte by byte, that knows nothing of their readers."""

import struct


def older_bytes(
    number,
    *,
    step,
    fragments,
    ledger=(),
    backend=0,
    fingerprint=bytes(32),
    contract=None,
):
    """Return a checkpoint file of version 1, 2 or 3.

    Args:
        number: the version.
        step: committed global steps.
        fragments: (version, params, momentum) of each; lists or arrays of numbers.
        ledger: (learner, merges, steps, tokens) of each.
        backend: 0 scalar, 1 torch-svd.
        fingerprint: 32 bytes, in version 3 only.
        contract: 32 bytes, in version 3 only; None leaves it out.
    """
    data = bytearray(struct.pack("<I", 0xD1705A7D + number))
    if number >= 2:
        data += struct.pack("<B", backend)
    if number >= 3:
        data += fingerprint
    data += struct.pack("<QI", step, len(fragments))
    for version, params, momentum in fragments:
        data += struct.pack("<QQ", version, len(params))
        for values in (params, momentum):
            data += struct.pack(f"<{len(values)}f", *(float(value) for value in values))
    data += struct.pack("<I", len(ledger))
    for entry in ledger:
        data += struct.pack("<IQQQ", *entry)
    if number >= 3:
        data += fingerprint
        if contract is not None:
            data += struct.pack("<I", 0x52544353) + contract
    return bytes(data)
