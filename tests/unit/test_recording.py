"""Log shards: rotated, bounded, private, and never continued over a cut line."""

from __future__ import annotations

import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intentkv.recording import ShardWriter, shards

pytestmark = pytest.mark.unit


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 120), max_size=40), limit=st.integers(100, 600), shard=st.integers(50, 300))
def test_bounded_and_in_order(tmp_path_factory, sizes, limit, shard):
    """Any lines, any limits. Catches: a total over the limit, a newest line deleted, a line split or out of order, a shard too large."""
    folder = tmp_path_factory.mktemp("logs")
    writer = ShardWriter(folder, limit, shard)
    written = []
    for number, size in enumerate(sizes):
        line = f"{number}:{'x' * size}".encode()
        written.append(line)
        writer.write(line)
        files = shards(folder)
        total = sum(p.stat().st_size for p in files)
        assert total <= max(limit, len(line) + 1) + shard or len(files) == 1
        assert total <= limit or len(files) == 1
        assert all(p.stat().st_size <= max(shard, 200) for p in files)
    kept = b"".join(p.read_bytes() for p in shards(folder)).splitlines()
    assert kept == written[len(written) - len(kept) :]
    assert not written or kept[-1] == written[-1]


def test_private(tmp_path):
    folder = tmp_path / "a" / "logs"
    writer = ShardWriter(folder, 1000, 100)
    writer.write(b"x")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(shards(folder)[0].stat().st_mode) == 0o600


def test_a_new_run_begins_a_new_shard(tmp_path):
    """The last run may have been killed in mid-line. Catches: two records in one line."""
    ShardWriter(tmp_path, 1000, 100).write(b"one")
    (tmp_path / "requests-000000.jsonl").write_bytes(b"one\ntw")
    (tmp_path / "notes.txt").write_text("not ours")
    ShardWriter(tmp_path, 1000, 100).write(b"three")
    assert (tmp_path / "requests-000001.jsonl").read_bytes() == b"three\n"
    assert (tmp_path / "notes.txt").exists()
