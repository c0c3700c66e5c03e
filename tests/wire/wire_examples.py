"""What several wire tests share: the worked examples as objects, Hypothesis strategies, settings."""

from hypothesis import settings
from hypothesis import strategies as st

from yeto.wire import FragmentLayout, Hello, HelloFragment, HelloLayout, Layout, MergeMode, TensorSpec
from yeto.wire.contract import TrainingManifest, session_contract
from yeto.wire.fingerprint import layout_fingerprint
from yeto.wire.frames import HEADER_BYTES, SLICE_BYTES
from yeto.wire.messages import (
    COUNTER_MAX,
    BroadcastHeader,
    BudgetDone,
    ChunkHeader,
    DataHello,
    ErrorMessage,
    FinalAck,
    FinalFragmentHeader,
    FinalManifest,
    Heartbeat,
    InitHeader,
    PullRequest,
    PushHeader,
    Shutdown,
)

REPEATABLE = settings(derandomize=True, deadline=None, max_examples=60)
"""The same examples on every run, however slow the machine is."""

KEY = b"not a secret"
GENERATION = 0x0123456789ABCDEF

LAYOUT = Layout(
    fragments=(
        FragmentLayout(mode=MergeMode.RDA, tensors=(TensorSpec(name="model.body.weight", shape=(4,)),)),
    )
)
BINDING = {
    "lora": {"alpha": 32, "r": 16, "targets": ["k_proj", "q_proj"]},
    "model": "example/tiny@0123abc",
    "note": "é",
    "num_learners": 2,
    "seed": 0,
    "tuning": "lora",
}
HELLO = Hello(
    learner=1,
    generation=GENERATION,
    dtype="bf16",
    layout=HelloLayout.of(LAYOUT),
    fingerprint=layout_fingerprint(LAYOUT),
    contract=session_contract(layout_fingerprint(LAYOUT), BINDING),
    num_streams=4,
)
MANIFEST = TrainingManifest(binding={"seed": 0}, merge_alpha=0.5, layout=LAYOUT)

BF16_TENSOR = bytes.fromhex("803f00bf803e0000")
F32_TENSOR = bytes.fromhex("0000803f000000bf")
PUSH = PushHeader(
    learner=1,
    fragment=2,
    step=7,
    attempt=1,
    base_version=3,
    local_step=120,
    c_steps=24,
    c_tokens=49152,
)

# Message and the bytes behind its head, for all but HELLO, CHUNK and MANIFEST.
EXAMPLES = {
    "INIT_PARAMS": (InitHeader(fragment=0), BF16_TENSOR),
    "PULL_REQ": (PullRequest(fragment=2, step=7, attempt=1), b""),
    "PUSH_FRAGMENT": (PUSH, BF16_TENSOR),
    "BCAST_FRAGMENT": (BroadcastHeader(fragment=2, version=7), BF16_TENSOR),
    "HEARTBEAT": (Heartbeat(learner=1, local_step=120), b""),
    "SHUTDOWN": (Shutdown(), b""),
    "DATA_HELLO": (DataHello(learner=1, generation=GENERATION, stream=2), b""),
    "ERROR": (ErrorMessage(text="HELLO authentication failed"), b""),
    "FINAL_MANIFEST": (FinalManifest(step=8, versions=(7, 8)), b""),
    "FINAL_ACK": (FinalAck(step=8), b""),
    "FINAL_FRAGMENT": (FinalFragmentHeader(fragment=1, version=8), F32_TENSOR),
    "BUDGET_DONE": (BudgetDone(local_steps=400), b""),
}

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
counters = st.integers(0, COUNTER_MAX)
attempts = st.integers(1, 2**32 - 1)


@st.composite
def chunk_headers(draw):
    total = draw(st.integers(HEADER_BYTES + 1, 2**42))
    slices = -(-total // SLICE_BYTES)
    offset = SLICE_BYTES * draw(st.integers(0, slices - 1))
    return ChunkHeader(message_id=draw(u64), total=total, offset=offset)


MESSAGES = {
    InitHeader: st.builds(InitHeader, fragment=u32),
    PullRequest: st.builds(PullRequest, fragment=u32, step=counters, attempt=attempts),
    PushHeader: st.builds(
        PushHeader,
        learner=u32,
        fragment=u32,
        step=counters,
        attempt=attempts,
        base_version=counters,
        local_step=counters,
        c_steps=u32,
        c_tokens=counters,
    ),
    BroadcastHeader: st.builds(BroadcastHeader, fragment=u32, version=counters),
    Heartbeat: st.builds(Heartbeat, learner=u32, local_step=counters),
    Shutdown: st.builds(Shutdown),
    DataHello: st.builds(
        DataHello, learner=u32, generation=st.integers(1, 2**64 - 1), stream=st.integers(1, 256)
    ),
    ChunkHeader: chunk_headers(),
    ErrorMessage: st.builds(ErrorMessage, text=st.text(max_size=200)),
    FinalManifest: st.builds(
        FinalManifest, step=counters, versions=st.lists(counters, min_size=1, max_size=20).map(tuple)
    ),
    FinalAck: st.builds(FinalAck, step=counters),
    FinalFragmentHeader: st.builds(FinalFragmentHeader, fragment=u32, version=counters),
    BudgetDone: st.builds(BudgetDone, local_steps=counters),
}
"""Legal messages of each class that has a payload of its own."""

sizes = st.integers(1, 2**20)


@st.composite
def hello_fragments(draw):
    mode = draw(st.sampled_from(MergeMode))
    if mode is MergeMode.ISO:
        matrices = tuple(draw(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=4)))
        # Up to 4 matrices of 2**40 elements: keep the fragment within its bound.
        matrices = tuple((rows % 2**18 + 1, columns % 2**18 + 1) for rows, columns in matrices)
        return HelloFragment(
            mode=mode, numels=tuple(rows * columns for rows, columns in matrices), matrices=matrices
        )
    return HelloFragment(mode=mode, numels=tuple(draw(st.lists(sizes, min_size=1, max_size=4))))


hashes = st.binary(min_size=32, max_size=32)
HELLOS = st.builds(
    Hello,
    learner=u32,
    generation=st.integers(1, 2**64 - 1),
    dtype=st.sampled_from(["f32", "bf16", "q4"]),
    layout=st.builds(HelloLayout, fragments=st.lists(hello_fragments(), min_size=1, max_size=5).map(tuple)),
    fingerprint=hashes,
    contract=hashes,
    num_streams=st.integers(0, 256),
    profile=st.none() | hashes,
)
