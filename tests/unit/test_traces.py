import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from gputail import events, traces
from gputail.errors import GputailError
from gputail.probes import table

DATA = Path(__file__).parent.parent / "data"
RECORDED = sorted(DATA.glob("*.npz"))
EVENT = np.dtype(
    [("ts", "<u8"), ("dur", "<u8"), ("func", "<u8"), ("stream", "<u8"), ("bytes", "<u8"), ("pid", "<u4"), ("tid", "<u4"), ("api", "<u4"),
     ("ret", "<i4"), ("grid", "<u4"), ("block", "<u4"), ("cpu", "<u8")]
)  # fmt: skip
APIS = {"cuLaunchKernel": 1, "cuMemcpyHtoDAsync_v2": 13, "cuSomethingNew": 77, "offcpu": 200}


def write(path: Path, rows: list[dict], **arrays: object) -> Path:
    rows_array = np.zeros(len(rows), EVENT)
    for target, row in zip(rows_array, rows, strict=True):
        for name, value in row.items():
            target[name] = value
    content = {"events": rows_array, "apis": json.dumps(APIS), "names": "[]", "victim": 5, "aggressor": 6, "lost": 0} | arrays
    np.savez(path, **content)  # type: ignore[arg-type]
    return path


def test_rows_get_our_numbers_and_fields(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.npz",
        [
            {"ts": 100, "dur": 50, "api": 1, "func": 0xF, "stream": 3, "grid": 7, "block": 32, "pid": 5, "tid": 6, "cpu": 2, "ret": -1},
            {"ts": 200, "dur": 10, "api": 13, "bytes": 4096, "pid": 5, "tid": 6},
            {"ts": 220, "dur": 5, "api": 200, "func": 1, "bytes": 223, "stream": 9, "pid": 5, "tid": 6},
        ],
    )
    calls = traces.load(path).calls
    assert [table.BY_NUMBER[number].name for number in calls["call"]] == ["cuLaunchKernel", "cuMemcpyHtoDAsync", "off_cpu"]
    assert calls["size"].tolist() == [7, 4096, 223]
    assert calls[["start_ns", "duration_ns", "handle", "stream", "tgid", "tid", "result", "block", "cpu"]][0].tolist() == (
        100, 50, 0xF, 3, 5, 6, -1, 32, 2,
    )  # fmt: skip


def test_rows_travel_in_order_of_their_end_and_nested_ones_are_marked(tmp_path: Path) -> None:
    rows = [
        {"ts": 100, "dur": 100, "api": 1, "tid": 1},
        {"ts": 120, "dur": 10, "api": 1, "tid": 1},
        {"ts": 120, "dur": 80, "api": 1, "tid": 1},
        {"ts": 150, "dur": 10, "api": 1, "tid": 2},
        {"ts": 210, "dur": 10, "api": 1, "tid": 1},
    ]
    calls = traces.load(write(tmp_path / "t.npz", rows)).calls
    assert list(zip(calls["start_ns"].tolist(), calls["depth"].tolist(), strict=True)) == [(120, 1), (150, 0), (120, 1), (100, 0), (210, 0)]


def test_functions_that_are_not_known_are_counted_as_lost(tmp_path: Path) -> None:
    trace = traces.load(write(tmp_path / "t.npz", [{"api": 77}, {"api": 1}, {"api": 99}], lost=4))
    assert len(trace.calls) == 1
    assert trace.lost == {"ring_full": 4, "unknown_function": 2}


@pytest.mark.parametrize("rows", [1, 7, 1000, 1 << 20])
def test_batches_hold_every_row_once_and_their_watermark_is_true(rows: int) -> None:
    trace = traces.load(RECORDED[0])
    small = traces.Trace(trace.calls[:5000], trace.names, trace.tgids, {"ring_full": 1})
    out = list(traces.batches(small, rows))
    assert (np.concatenate([batch.calls for batch in out]) == small.calls).all()
    ends = [events.end_ns(batch.calls) for batch in out]
    for batch, later in zip(out, ends[1:], strict=False):
        assert later[0] >= batch.watermark_ns
    assert out[-1].watermark_ns > ends[-1][-1]
    assert sum(batch.lost.get("ring_full", 0) for batch in out) == 1
    assert {process.tgid for process in out[0].processes} == set(trace.tgids)


def test_an_empty_trace_is_one_empty_batch(tmp_path: Path) -> None:
    (batch,) = traces.batches(traces.load(write(tmp_path / "t.npz", [])))
    assert len(batch.calls) == 0


def test_kernel_names_become_name_rows(tmp_path: Path) -> None:
    names = json.dumps([[0xABC, 5, "_Z4gemm"], [0xDEF, 5, "k" * 500]])
    rows = traces.load(write(tmp_path / "t.npz", [{"api": 1}], names=names)).names
    assert [(int(row["handle"]), bytes(row["text"])[: row["length"]].decode(), int(row["flags"])) for row in rows] == [
        (0xABC, "_Z4gemm", 0),
        (0xDEF, "k" * 224, events.NAME_TRUNCATED),
    ]


def refused(path: Path) -> str:
    with pytest.raises(GputailError) as caught:
        traces.load(path)
    assert str(path) in caught.value.problem
    assert "\n" not in caught.value.problem
    return caught.value.problem


def test_a_file_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "none.npz")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    refused(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"hello", bytes(1000)])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.npz"
    path.write_bytes(content)
    assert "not a trace" in refused(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_truncated_trace_is_refused(tmp_path: Path, share: float) -> None:
    whole = RECORDED[0].read_bytes()
    path = tmp_path / "t.npz"
    path.write_bytes(whole[: int(share * len(whole))])
    refused(path)


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_trace_is_refused_or_read_but_never_a_traceback(tmp_path: Path, seed: int) -> None:
    chance = np.random.default_rng(seed)
    content = bytearray(write(tmp_path / "small.npz", [{"ts": n, "dur": 1, "api": 1} for n in range(50)]).read_bytes())
    for place in chance.integers(0, len(content), 12):
        content[place] = chance.integers(256)
    path = tmp_path / "t.npz"
    path.write_bytes(bytes(content))
    try:
        traces.load(path)
    except GputailError as error:
        assert str(path) in error.problem


def test_arrays_that_are_missing_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    np.savez(path, events=np.zeros(0, EVENT))
    assert "no array apis, victim, aggressor" in refused(path)


def test_pickled_content_is_never_loaded(tmp_path: Path) -> None:
    path = write(tmp_path / "t.npz", [], victim=np.array([object()], dtype=object))
    refused(path)


@pytest.mark.parametrize(
    "arrays",
    [
        {"apis": "[1"}, {"apis": "[]"}, {"apis": '{"cuLaunchKernel": "one"}'}, {"apis": '{"cuLaunchKernel": 9999999}'},
        {"names": '[["a"]]'},
        {"names": '[[-1, 2, "k"]]'}, {"events": np.zeros(3)}, {"victim": np.zeros(3)}, {"names": "[" * 100_000},
    ],
)  # fmt: skip
def test_arrays_of_the_wrong_kind_are_refused(tmp_path: Path, arrays: dict) -> None:
    refused(write(tmp_path / "t.npz", [{"api": 1}], **arrays))


def test_times_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    assert "times" in refused(write(tmp_path / "t.npz", [{"ts": 1 << 63, "dur": 1 << 63, "api": 1}]))


def test_a_file_that_would_expand_beyond_the_bound_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_BYTES", 10_000)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("events.npy", bytes(1_000_000))
    path = tmp_path / "t.npz"
    path.write_bytes(buffer.getvalue())
    assert "expand to 1000000 bytes" in refused(path)
