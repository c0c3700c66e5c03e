import json
import sys

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from yeto.errors import ConfigError, DataError
from yeto.tuning.rows import Cursor, open_source, without_nulls

ROWS = [{"messages": [{"role": "user", "content": f"row {number}"}]} for number in range(7)]


def lines(rows=ROWS, end="\n"):
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)


def read(source, start=None, wanted=None):
    return list(source.rows(start or Cursor(), wanted))


def values(path, **options):
    return [row.value for row in read(open_source(str(path), **options))]


@pytest.mark.parametrize(
    "content",
    [
        lines().encode(),
        b"\xef\xbb\xbf" + lines().encode(),
        b"\n\xef\xbb\xbf\r\n".join(b"\xef\xbb\xbf" + line for line in lines().encode().splitlines()),
        lines(end="\r\n").encode(),
        lines(end="\n\n \n\r\n").encode(),
        lines().rstrip("\n").encode(),
    ],
    ids=["lf", "bom", "joined", "crlf", "blank lines", "no last newline"],
)
def test_jsonl_spellings_give_the_same_rows(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    found = read(open_source(str(path)))
    assert [row.value for row in found] == ROWS
    assert [row.index for row in found] == list(range(7))


BOM = "\ufeff"


@pytest.fixture(
    params=["jsonl", "lines.json", "list.json", "folder", "parquet", "saved", "saved parts", "url"]
)
def with_marks(request, tmp_path):
    """Return rows in every form there is, with a byte-order mark wherever a tool could have put one."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    # A table that was made of text with a mark has it in the name of its first column.
    marked = [{BOM + "id": number, **row} for number, row in enumerate(ROWS)]
    rows = [{"id": number, **row} for number, row in enumerate(ROWS)]
    place = tmp_path / f"rows.{request.param}"
    if request.param in ("jsonl", "lines.json"):
        place.write_text(BOM + lines(rows), encoding="utf-8")
    elif request.param == "list.json":
        place.write_text(BOM + json.dumps(rows), encoding="utf-8")
    elif request.param == "folder":
        place.mkdir()
        for number, part in enumerate((rows[:3], rows[3:])):
            (place / f"{number}.jsonl").write_text(BOM + lines(part, end="\r\n"), encoding="utf-8")
    elif request.param == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(marked), place)
    elif request.param == "url":
        fsspec.filesystem("memory").pipe("/marks/rows.jsonl", (BOM + lines(rows)).encode())
        return "memory://marks/rows.jsonl", rows
    else:
        table = datasets.Dataset.from_list(marked)
        table = datasets.DatasetDict(train=table) if request.param == "saved parts" else table
        table.save_to_disk(place)
    return str(place), rows


def test_a_byte_order_mark_is_no_data_in_any_form(with_marks):
    spec, rows = with_marks
    assert values(spec) == rows


def test_a_byte_order_mark_inside_a_text_is_data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(lines([{"a": BOM + "x"}, {BOM + "a": "y"}]), encoding="utf-8")
    assert values(path) == [{"a": BOM + "x"}, {BOM + "a": "y"}]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c"])
def test_only_a_newline_ends_a_row(tmp_path, character):
    text = f"one{character}two"
    escaped = json.dumps(text, ensure_ascii=character in "\x0b\x0c")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": ' + escaped + '}\n{"a": "three"}\n', encoding="utf-8")
    assert values(path) == [{"a": text}, {"a": "three"}]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (b'{"a": 1', "line 3: not JSON: .*; every line holds one row, whole$"),
        (b'"text"', "line 3: a row is a JSON object, this is str"),
        (b'{"a": "\xff"}', "line 3: not UTF-8"),
        (b'{"a": 1} {"a": 2}', "line 3: not JSON"),
        (b"[" * 200_000, "line 3: nested too deeply"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, bad, problem):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + bad + b'\n{"a": 2}\n')
    with pytest.raises(DataError, match=rf"^rows\.jsonl {problem}"):
        read(open_source(str(path)))


NUMBERS = [
    "NaN",
    "-Infinity",
    "1e400",
    "-0.0",
    "0.1",
    "5e-324",
    "1" + "0" * 30,
    "18446744073709551616",
    "1E2",
]


@pytest.mark.parametrize("text", [*NUMBERS, r'"\ud83d\ude00"', r'"\ud83d"', '{"b": 1, "b": 2}', r'"\u2028"'])
def test_values_are_read_as_python_reads_json(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": ' + text + "}\n")
    (row,) = values(path)
    assert repr(row["a"]) == repr(json.loads(text))


def test_a_huge_integer_in_an_unused_column_does_not_matter(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": ' + "9" * 5000 + ', "small": 9007199254740993, "a": "text"}\n')
    (row,) = values(path)
    assert row["a"] == "text"
    assert row["small"] == 9007199254740993


def test_a_line_longer_than_a_read_is_one_row(tmp_path):
    text = "x" * 3_000_000
    path = tmp_path / "rows.jsonl"
    path.write_text(lines([{"a": text}, {"a": "y"}]))
    assert values(path) == [{"a": text}, {"a": "y"}]


@pytest.mark.parametrize("start", range(8))
def test_every_cursor_leads_to_the_row_behind_it(tmp_path, start):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_text("\ufeff" + lines(ROWS[:3], end="\r\n\n"))
    (folder / "b.json").write_text(json.dumps(ROWS[3:5]))
    (folder / "c.jsonl").write_text(lines(ROWS[5:]))
    source = open_source(str(folder))
    everything = read(source)
    assert [row.value for row in everything] == ROWS
    cursor = everything[start - 1].after if start else Cursor()
    assert read(source, cursor) == everything[start:]
    assert read(source, cursor, range(1, sys.maxsize, 3)) == [
        row for row in everything[start:] if row.index % 3 == 1
    ]


@pytest.mark.parametrize("start", [0, 1, 255, 256, 299, 300, 599, 600])
def test_parquet_is_entered_in_the_middle(tmp_path, start):
    import pyarrow
    import pyarrow.parquet

    rows = [{"number": number, "text": f"row {number}"} for number in range(600)]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=300)
    source = open_source(str(path))
    everything = read(source)
    assert [row.value for row in everything] == rows
    cursor = everything[start - 1].after if start else Cursor()
    assert read(source, cursor) == everything[start:]


def test_json_with_a_list_and_json_with_lines(tmp_path):
    listed, lined = tmp_path / "list.json", tmp_path / "lines.json"
    listed.write_text("\ufeff " + json.dumps(ROWS, indent=2))
    lined.write_text(lines())
    assert values(listed) == values(lined) == ROWS


def test_a_folder_gives_its_training_files_only(tmp_path):
    for name in ("train-00.jsonl", "train-01.jsonl", "test.jsonl", "validation.jsonl"):
        (tmp_path / name).write_text(lines([{"file": name}]))
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "._train-00.jsonl").write_bytes(b"\0\5\x16\7")
    assert values(tmp_path) == [{"file": "train-00.jsonl"}, {"file": "train-01.jsonl"}]
    (tmp_path / "train-00.jsonl").unlink()
    (tmp_path / "train-01.jsonl").unlink()
    (tmp_path / "part.jsonl").write_text(lines([{"file": "part.jsonl"}]))
    assert values(tmp_path) == [{"file": "part.jsonl"}]


@pytest.mark.parametrize("split", [False, True])
def test_a_saved_dataset_gives_rows_without_filled_in_nulls(tmp_path, split):
    import datasets

    messages = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": ["x"]}],
        [{"role": "user", "content": "b"}],
    ]
    table = datasets.Dataset.from_list([{"messages": part} for part in messages])
    saved = datasets.DatasetDict(train=table) if split else table
    saved.save_to_disk(tmp_path / "saved")
    found = values(tmp_path / "saved")
    assert found == [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": ["x"]}]},
        {"messages": [{"role": "user", "content": "b"}]},
    ]


def test_parquet_gives_rows_without_filled_in_nulls(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"call": {"a": 1}, "text": "x"}, {"call": {"b": [None]}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert values(tmp_path / "rows.parquet") == rows


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_a_text_that_is_none_is_named_with_its_row(tmp_path, kind):
    """Bytes that are no UTF-8, in a column that says it holds texts: other tools do not look."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.array([b"good", b"b\xffd", b"good"], pyarrow.binary()).view(pyarrow.string())
    table, path = pyarrow.table({"a": texts}), tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        datasets.Dataset(table).save_to_disk(path)
    source = open_source(str(path))
    assert [row.index for row in read(source, wanted=range(0, 3, 2))] == [0, 2]
    with pytest.raises(DataError, match=rf"^rows\.{kind} row 1: not UTF-8 \(byte 1 of a text\)"):
        read(source)


@pytest.mark.parametrize(
    ("file", "content"), [("state.json", "{}"), ("state.json", "[]"), ("dataset_dict.json", "{}")]
)
def test_a_saved_data_set_that_is_damaged_is_named_whatever_the_library_raises(tmp_path, file, content):
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    saved = datasets.DatasetDict(train=table) if file == "dataset_dict.json" else table
    saved.save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / file).write_text(content)
    with pytest.raises(DataError, match=rf"^--data {tmp_path}/saved: not a readable save_to_disk folder: "):
        open_source(str(tmp_path / "saved"))


def test_a_data_set_of_the_hub_gives_its_train_split_at_a_revision(monkeypatch):
    import datasets

    def load(name, *, split, revision):
        assert (name, split, revision) == ("someone/chats", "train", "v1")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = open_source("someone/chats", revision="v1")
    everything = read(source)
    assert [row.value for row in everything] == ROWS
    assert read(source, everything[2].after, range(1, 7, 2)) == everything[3::2]
    assert everything[2].origin == "someone/chats row 2"


def test_nulls_in_lists_are_values():
    assert without_nulls({"a": [None, {"b": None, "c": 1}], "d": None}) == {"a": [None, {"c": 1}]}


def test_any_file_system_that_fsspec_knows():
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/rows.jsonl", lines().encode())
    assert values("memory://bucket/rows.jsonl") == ROWS
    assert values("memory://bucket") == ROWS


@pytest.fixture
def bucket(monkeypatch):
    """Return a function that puts a file system in memory behind a scheme, with one file in it."""

    def serve(scheme, read=None):
        class Bucket(MemoryFileSystem):
            protocol = scheme
            store = {}  # noqa: RUF012
            pseudo_dirs = [""]  # noqa: RUF012

            @classmethod
            def _strip_protocol(cls, path):
                return "/" + path.removeprefix(f"{scheme}://").strip("/")

            def open(self, *args, **options):
                file = super().open(*args, **options)
                if read is not None:
                    file.read = read
                return file

        monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, scheme, Bucket)
        fsspec.filesystem(scheme, skip_instance_cache=True).pipe("/bucket/rows.jsonl", lines().encode())

    return serve


def test_a_hub_that_is_switched_off_is_asked_once(monkeypatch):
    """Asking again in two, four and eight seconds gives the same; what to do is said at once."""
    waited = []
    monkeypatch.setattr("yeto.tuning.hub.time.sleep", waited.append)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as error:
        open_source("nobody/none", flag="--eval-data")
    assert str(error.value) == (
        "--eval-data nobody/none: no such local file, and as a Hugging Face data set it failed: "
        "HF_HUB_OFFLINE is set, and there is no copy of it on this machine; unset that to fetch it"
    )
    assert not waited


@pytest.mark.parametrize("scheme", ["s3", "gs", "hf"])
def test_buckets_and_the_hub_are_file_systems_like_others(bucket, scheme):
    bucket(scheme)
    source = open_source(f"{scheme}://bucket/rows.jsonl")
    everything = read(source)
    assert [row.value for row in everything] == ROWS
    assert read(source, everything[3].after) == everything[4:]
    assert values(f"{scheme}://bucket") == ROWS
    with pytest.raises(ConfigError, match=rf"^--data {scheme}://bucket/none.jsonl: no such file"):
        open_source(f"{scheme}://bucket/none.jsonl")


def test_what_a_file_system_raises_is_said_in_one_line(bucket):
    class ConnectionLost(Exception):
        """Like those of network libraries: no OSError."""

    def read_nothing(*_):
        raise ConnectionLost("timed out\nafter three tries")

    bucket("s3", read_nothing)
    with pytest.raises(DataError, match=r"rows\.jsonl: cannot read: ConnectionLost: timed out after three"):
        read(open_source("s3://bucket/rows.jsonl"))


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("missing.jsonl", "no such file or folder"),
        ("./missing", "no such file or folder"),
        ("memory://nothing/here.jsonl", "no such file"),
        ("nosuch://x/y.jsonl", "cannot open"),
        ("someone/no-such-data-set", "as a Hugging Face data set it failed"),
    ],
)
def test_what_is_not_there_is_refused_by_flag(spec, problem):
    with pytest.raises(ConfigError, match=f"^--eval-data .*{problem}"):
        open_source(spec, flag="--eval-data")


def test_an_unknown_kind_of_file_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match="unknown kind of file"):
        open_source(str(tmp_path / "rows.csv"))
    with pytest.raises(ConfigError, match=r"no \.jsonl"):
        open_source(str(tmp_path))


@pytest.mark.parametrize(
    "damage", [lambda data: b"PAR1 not really", lambda data: data.replace(b"abc", b"ab\xff")]
)
def test_a_file_that_is_no_parquet_is_named(tmp_path, damage):
    """In the second, the name of a column is no text."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"abc": [1]}), tmp_path / "rows.parquet")
    data = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "rows.parquet").write_bytes(damage(data))
    with pytest.raises(DataError, match=r"^rows\.parquet: not a readable parquet file"):
        read(open_source(str(tmp_path / "rows.parquet")))
