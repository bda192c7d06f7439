"""Whatever bytes come, a message is either refused with MessageError or whole: never another error, never a hang."""

import json
import pickle
import tracemalloc
from contextlib import suppress
from time import monotonic

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from fedloom.core.job import Result
from fedloom.core.message import HEADER_LIMIT, Message, MessageError, pack, signature, unpack

TENSORS = {
    "model.extractor.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "model.head.bias": torch.tensor([1.0, -2.0], dtype=torch.float64),
    "model.half": torch.ones(3, dtype=torch.bfloat16),
    "counts": torch.tensor([1, 2, 3]),
    "flags": torch.tensor([True, False]),
    "empty": torch.zeros(0, 5),
    "scalar": torch.tensor(3.5),
}
GOOD = Message(TENSORS, client=4, samples=77).to_bytes()
EXPECTED = signature(TENSORS)


def split(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header, rest):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


def flipped(bits):
    data = bytearray(GOOD)
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def overwritten(edits):
    data = bytearray(GOOD)
    for place, value in edits:
        data[place] = value
    return bytes(data)


def cut(start, stop, inserted):
    return GOOD[: min(start, stop)] + inserted + GOOD[max(start, stop) :]


def described(name, field, value):
    header, rest = split(GOOD)
    header[name][field] = value
    return joined(header, rest)


def with_metadata(value):
    header, rest = split(GOOD)
    header["__metadata__"] = value
    return joined(header, rest)


def swapped(one, other, shared):
    header, rest = split(GOOD)
    here, there = header[one]["data_offsets"], header[other]["data_offsets"]
    header[one]["data_offsets"], header[other]["data_offsets"] = there, here
    if shared:
        header[one] = dict(header[other])
    return joined(header, rest)


def renamed(name, new, twice):
    header, rest = split(GOOD)
    pairs = [(new if n == name else n, entry) for n, entry in header.items()]
    pairs += [(name, header[name])] if twice else []
    text = ",".join(f"{json.dumps(n)}:{json.dumps(entry)}" for n, entry in pairs)
    return joined(f"{{{text}}}".encode(), rest)


HEAD = int.from_bytes(GOOD[:8], "little") + 8
NAMES = st.sampled_from(sorted(TENSORS))
PLACES = st.integers(0, len(GOOD))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
SIZES = st.sampled_from([0, 1, 3, 4, 12, 2**31, 2**32, 2**62, 2**63, 2**64, 10**30, -1, 1.0, "3", True, None])
SHAPES = st.lists(SIZES, max_size=40)
TYPES = st.sampled_from(["F32", "F64", "I64", "U8", "BOOL", "F8_E4M3", "C64", "U64", "F4"])
FIELDS = st.sampled_from(["dtype", "shape", "data_offsets"])
LENGTHS = st.integers(0, 2**64 - 1) | st.integers(0, 2 * len(GOOD))
OWN = st.dictionaries(st.sampled_from(["client", "samples", "more"]), VALUES, max_size=3)
MUTATIONS = [
    st.builds(flipped, st.lists(st.integers(0, len(GOOD) * 8 - 1), min_size=1, max_size=6)),
    st.builds(overwritten, st.lists(st.tuples(st.integers(0, HEAD - 1), st.integers(0, 255)), max_size=4)),
    st.builds(cut, PLACES, PLACES, st.binary(max_size=40)),
    st.builds(lambda end: GOOD[:end], PLACES),
    st.builds(lambda length, tail: length.to_bytes(8, "little") + GOOD[8:] + tail, LENGTHS, st.binary(max_size=9)),
    st.builds(described, NAMES, FIELDS, VALUES | SHAPES | TYPES),
    st.builds(with_metadata, VALUES | st.dictionaries(st.sampled_from(["fedloom", "other"]), VALUES, max_size=2)),
    st.builds(lambda own: with_metadata({"fedloom": json.dumps(own)}), OWN),
    st.builds(swapped, NAMES, NAMES, st.booleans()),
    st.builds(renamed, NAMES, NAMES | st.text(max_size=9), st.booleans()),
    st.binary(max_size=300),
]


@pytest.mark.parametrize("examples", [600, pytest.param(3000, marks=pytest.mark.slow)])
def test_mutated_messages_are_refused_with_the_typed_error_or_are_valid(examples):
    refused, accepted = [], []

    @settings(max_examples=examples, deadline=5000, suppress_health_check=list(HealthCheck), database=None)
    @seed(6)
    @given(st.one_of(MUTATIONS), st.booleans())
    def each(data, strict):
        expected = EXPECTED if strict else None
        try:
            message = Message.from_bytes(data, limit=len(GOOD) + 4096, expected=expected)
        except MessageError as error:
            refused.append(str(error))
            return
        accepted.append(data)
        assert type(message.samples) is int and message.samples >= 0
        assert message.client is None or type(message.client) is int
        assert message.nbytes <= len(data)
        for tensor in message.values():
            tensor.double().sum()
        assert expected is None or signature(message) == expected
        assert Message.from_bytes(message.to_bytes()).keys() == message.keys()

    each()
    assert len(refused) + len(accepted) >= examples * 2 // 3
    assert len(refused) > examples // 6 and len(accepted) > examples // 30
    assert max(map(len, refused)) < 600  # a message cannot make the log as long as it likes


@settings(max_examples=200, deadline=5000, database=None)
@seed(6)
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=3))
def test_a_result_that_came_damaged_is_refused_the_same_way(place, value):
    good = Result(3, Message(TENSORS, client=3, samples=9), memory={"a": torch.ones(2)}, loss=0.5).to_bytes()
    place %= len(good)
    with suppress(MessageError):
        Result.from_bytes(good[:place] + value + good[place + len(value) :])


HAND_MADE = {
    "nothing": b"",
    "seven bytes": GOOD[:7],
    "no header": (0).to_bytes(8, "little"),
    "a header of 2**63 bytes": (2**63).to_bytes(8, "little") + GOOD[8:],
    "a header beyond the end": (len(GOOD)).to_bytes(8, "little") + GOOD[8:],
    "a list": joined([1], b""),
    "NaN": joined(b'{"__metadata__": {"fedloom": "{}"}, "a": NaN}', b""),
    "deep nesting": joined(b'{"a":' * 100_000, b""),
    "a name twice": joined(
        b'{"__metadata__": {"fedloom": "{\\"client\\": 1, \\"samples\\": 1}"},'
        b'"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},'
        b'"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
        b"x",
    ),
    "a lone surrogate": joined(
        b'{"__metadata__": {"fedloom": "{\\"client\\": 1, \\"samples\\": 1}"},'
        b'"\\ud800": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
        b"x",
    ),
    "a number of 5,000 digits": joined(b'{"a": ' + b"9" * 5000 + b"}", b""),
    "not UTF-8": joined(b'{"\xff": 1}', b""),
    "NaN samples": joined({"__metadata__": {"fedloom": '{"client": 1, "samples": NaN}'}}, b""),
    "true as samples": joined({"__metadata__": {"fedloom": '{"client": 1, "samples": true}'}}, b""),
    "too many samples": joined({"__metadata__": {"fedloom": '{"client": 1, "samples": 1e400}'}}, b""),
    "a pickle": pickle.dumps(TENSORS),
    "two hundred dimensions": joined(
        {
            "__metadata__": {"fedloom": '{"client": 1, "samples": 1}'},
            "a": {"dtype": "U8", "shape": [1] * 200, "data_offsets": [0, 1]},
        },
        b"x",
    ),
    "an empty tensor of huge sizes": joined(
        {
            "__metadata__": {"fedloom": '{"client": 1, "samples": 1}'},
            "a": {"dtype": "F32", "shape": [0, 2**61, 2**61], "data_offsets": [0, 0]},
        },
        b"",
    ),
    "two for a truth value": pack({"a": torch.tensor([True])}, {"client": 1, "samples": 1})[:-1] + b"\x02",
    "bytes after the end": GOOD + b"\0",
}


@pytest.mark.parametrize("data", HAND_MADE.values(), ids=list(HAND_MADE))
def test_hand_made_ones_are_refused(data):
    with pytest.raises(MessageError):
        Message.from_bytes(data)


def test_a_huge_declared_shape_allocates_nothing():
    header, rest = split(GOOD)
    header["counts"]["shape"] = [2**40]
    header["counts"]["data_offsets"][1] = header["counts"]["data_offsets"][0] + 2**43
    data, begun = joined(header, rest), monotonic()
    tracemalloc.start()
    with pytest.raises(MessageError, match="overlap or leave gaps|take"):
        Message.from_bytes(data)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert monotonic() - begun < 1


def test_a_message_over_the_limit_is_refused_unread():
    with pytest.raises(MessageError, match=rf"it has {len(GOOD)} bytes, but only 100 are allowed"):
        Message.from_bytes(GOOD, limit=100)
    assert len(Message.from_bytes(GOOD, limit=len(GOOD))) == len(TENSORS)
    long = {"x" * 4000 + str(i): torch.zeros(1) for i in range(HEADER_LIMIT // 4000 + 1)}
    with pytest.raises(MessageError, match="its header claims"):
        unpack(pack(long, {}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"counts": torch.tensor([1, 2])}, r"'counts' is torch\.int64 \[2\], but torch\.int64 \[3\] is expected"),
        ({"counts": torch.tensor([1.0, 2, 3])}, r"'counts' is torch\.float32 \[3\], but torch\.int64"),
        ({"more": torch.ones(1)}, "'more' is not expected"),
        ({"counts": None}, "'counts' is missing"),
    ],
)
def test_what_is_not_expected_is_named(change, words):
    tensors = {name: tensor for name, tensor in (TENSORS | change).items() if tensor is not None}
    with pytest.raises(MessageError, match=words):
        Message.from_bytes(Message(tensors, client=1).to_bytes(), expected=EXPECTED)
    assert Message.from_bytes(GOOD, expected=EXPECTED).samples == 77
