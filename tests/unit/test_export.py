"""`gputail export`: recordings as Parquet, and the questions that are shipped with it, asked in a real engine."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import duckdb
import pyarrow.dataset
import pytest

from gputail import cli, export
from gputail.capture import CaptureReader, CaptureWriter
from gputail.events import Process
from gputail.pipeline import replay_batches
from gputail.tail import RequestRecord
from tests.unit.streams import MS, Actor, batches, stream

NODE = "gpu-7.example"


def slow_neighbour() -> tuple[Actor, Actor]:
    """A program whose every tenth request waits for another process's kernels."""
    victim, other = Actor(tgid=100), Actor(tgid=200)
    for number in range(200):
        if number > 60 and number % 10 == 0:
            other.now_ns = victim.now_ns
            other.launch(duration_ns=5000, grid=4096).sync(9 * MS)
            victim.serve(wait_ns=9 * MS)
        else:
            victim.serve()
    return victim, other


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "one.gpt"
    with CaptureWriter(str(path), {"node": NODE, "started_unix_ns": 1_780_000_000 * 10**9, "started_monotonic_ns": 1000 * 10**9}) as writer:
        for number, batch in enumerate(batches(stream(*slow_neighbour()))):
            processes = (Process(100, "server", "python3 serve.py", None, "web"), Process(200, "noisy", "noisy 1")) if number == 0 else ()
            writer.write(type(batch)(batch.calls, processes=processes, watermark_ns=batch.watermark_ns))
    return path


def records_of(path: Path) -> list[RequestRecord]:
    with CaptureReader(str(path)) as reader:
        return list(replay_batches(list(reader)))


def rows(folder: Path, table: str) -> list[dict]:
    dataset = pyarrow.dataset.dataset(folder / table, partitioning="hive")
    return sorted(dataset.to_table().to_pylist(), key=lambda row: (row["time"], row["tid"]))


def test_every_request_and_every_contribution_is_one_row_with_the_wall_clock_time_of_its_end(recording: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(recording), "--parquet", str(tmp_path / "out")]) == 0
    records = sorted(records_of(recording), key=lambda record: (record.end_ns // 1000, record.tid))
    assert sum(record.outlier for record in records) == 13
    requests, contributions = rows(tmp_path / "out", "requests"), rows(tmp_path / "out", "contributions")
    assert [(row["duration_ns"], row["outlier"], row["cause"]) for row in requests] == [
        (r.duration_ns, r.outlier, r.cause) for r in records
    ]
    assert len(contributions) == sum(len(record.contributions) for record in records)
    assert sum(row["cause_ns"] for row in contributions) == sum(record.excess_ns or 0 for record in records)
    first = requests[0]
    end_us = (records[0].end_ns - 1000 * 10**9 + 1_780_000_000 * 10**9) // 1000
    assert first["time"] == datetime.fromtimestamp(end_us / 1e6, timezone.utc)
    assert (first["node"], first["hour"], first["command"], first["container"]) == (NODE, "2026-05-28-20", "python3 serve.py", "web")
    assert sum(first[f"{part}_ns"] for part in export.PARTS) == first["duration_ns"]
    assert {(row["culprit_pid"], row["culprit_comm"]) for row in contributions if row["cause"] == "foreign_kernel"} == {(200, "noisy")}


def test_exporting_again_replaces_and_another_recording_adds(recording: Path, tmp_path: Path) -> None:
    count = len(records_of(recording))
    for _ in range(2):
        assert export.run([str(recording)], str(tmp_path / "out"), None) == 0
    assert len(rows(tmp_path / "out", "requests")) == count
    assert export.run([str(recording)], str(tmp_path / "out"), "another") == 0
    assert len(rows(tmp_path / "out", "requests")) == 2 * count


def test_rows_beyond_a_row_group_are_all_there(recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "ROW_GROUP", 7)
    export.run([str(recording)], str(tmp_path / "out"), None)
    assert len(rows(tmp_path / "out", "requests")) == len(records_of(recording))


def test_an_hour_that_ends_in_the_recording_ends_its_file(tmp_path: Path) -> None:
    path = tmp_path / "two-hours.gpt"
    hour = 1_780_002_000 * 10**9  # full
    actor = Actor()
    facts = {"node": NODE, "started_unix_ns": hour - 300 * MS, "started_monotonic_ns": actor.now_ns}
    for _ in range(200):
        actor.serve()
    with CaptureWriter(str(path), facts) as writer:
        for batch in batches(stream(actor)):
            writer.write(batch)
    export.run([str(path)], str(tmp_path / "out"), None)
    hours = {row["hour"] for row in rows(tmp_path / "out", "requests")}
    assert hours == {"2026-05-28-20", "2026-05-28-21"}
    assert len(list((tmp_path / "out" / "requests").rglob("*.parquet"))) == 2


@pytest.mark.parametrize("name", sorted(export.queries()))
def test_each_question_has_an_answer_in_duckdb(name: str, recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for node in ("one", "two"):
        export.run([str(recording)], str(out), node)
    with duckdb.connect() as engine:
        for table in export.TABLES:
            engine.execute(f"CREATE VIEW {table} AS SELECT * FROM read_parquet('{out}/{table}/**/*.parquet', hive_partitioning = true)")
        answer = engine.execute(export.queries()[name])
        columns = [column[0] for column in answer.description]
        found = [dict(zip(columns, row, strict=True)) for row in answer.fetchall()]
    assert {row["node"] for row in found} == {"one", "two"}
    if name == "who-hurt-whom":
        assert [(row["culprit_comm"], row["cause"], row["requests"]) for row in found] == [("noisy", "foreign_kernel", 13)] * 2
    if name == "worst-nodes":
        assert {row["top_cause"] for row in found} == {"foreign_kernel"}


def test_the_questions_are_printed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "--query", "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == sorted(export.queries())
    assert all(len(line.split()) > 4 for line in listed)
    assert cli.main(["export", "--query", "who-hurt-whom"]) == 0
    assert capsys.readouterr().out == export.queries()["who-hurt-whom"]
    assert cli.main(["export", "--query", "who"]) == 2


def test_what_cannot_be_exported_gets_one_line_and_leaves_nothing(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    cases = (
        (["tests/data/gil.npz"], "does not say when it was made"),
        ([str(tmp_path / "none.gpt")], "cannot read"),
        ([str(recording), "--node", "../other"], "cannot be that of a folder"),
        ([str(recording), "--node", ""], "cannot be that of a folder"),
    )
    for arguments, message in cases:
        assert cli.main(["export", *arguments, "--parquet", str(out)]) == 1
        assert message in capsys.readouterr().err
        assert not out.exists()
    out.write_text("no folder")
    assert cli.main(["export", str(recording), "--parquet", str(out)]) == 1
    assert "cannot write" in capsys.readouterr().err
    assert cli.main(["export", str(recording)]) == 2


def test_a_recording_that_is_cut_off_is_exported_as_far_as_it_goes(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with CaptureWriter(str(tmp_path / "two.gpt"), {"node": NODE}) as writer:
        calls = stream(*slow_neighbour())
        for batch in batches(calls, [len(calls) // 2]):
            writer.write(batch)
    whole = (tmp_path / "two.gpt").read_bytes()
    (tmp_path / "two.gpt").write_bytes(whole[: int(0.9 * len(whole))])
    assert cli.main(["export", str(tmp_path / "two.gpt"), "--parquet", str(tmp_path / "out")]) == 1
    assert "what could be read was exported" in capsys.readouterr().err
    assert 90 <= len(rows(tmp_path / "out", "requests")) < 200


def test_a_disk_that_fills_up_leaves_nothing_unfinished(recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    export.run([str(recording)], str(tmp_path / "out"), None)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    monkeypatch.setattr(export.os, "replace", full)
    with pytest.raises(export.GputailError, match="no space left on device"):
        export.run([str(recording)], str(tmp_path / "out"), None)
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_each_question_has_the_same_answer_in_spark(recording: Path, tmp_path: Path) -> None:
    sql = pytest.importorskip("pyspark.sql", reason="no pyspark")
    out = tmp_path / "out"
    for node in ("one", "two"):
        export.run([str(recording)], str(out), node)
    spark = sql.SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "1")
    session = spark.config("spark.sql.session.timeZone", "UTC").getOrCreate()
    try:
        with duckdb.connect() as engine:
            engine.execute("SET TimeZone = 'UTC'")
            for table in export.TABLES:
                engine.execute(f"CREATE VIEW {table} AS SELECT * FROM read_parquet('{out}/{table}/**/*.parquet', hive_partitioning = true)")
                session.read.parquet(str(out / table)).createOrReplaceTempView(table)
            for name, question in export.queries().items():
                theirs = [[_plain(cell) for cell in row] for row in session.sql(question).collect()]
                assert theirs == [[_plain(cell) for cell in row] for row in engine.execute(question).fetchall()], name
    finally:
        session.stop()


def _plain(cell: object) -> object:
    if isinstance(cell, datetime):
        return cell.replace(tzinfo=None)
    return cell if cell is None or isinstance(cell, str | bool) else round(float(cell), 3)  # type: ignore[arg-type]
