"""The file that names the hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tarantella.cli.hostfile import read_hostfile
from tarantella.errors import InputError


def test_names_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\nnode2\n\n  node1.cluster.example  # fast\n\t10.0.0.7\nn_3-b\n")
    assert read_hostfile(str(file)) == ("node2", "node1.cluster.example", "10.0.0.7", "n_3-b")


def test_lines_of_another_system(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(b"\xef\xbb\xbfnode1\r\nnode2\r\n")
    assert read_hostfile(str(file)) == ("node1", "node2")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "names no host"),
        (b"# none\n\n", "names no host"),
        (b"a\nb\na\n", "the host a twice, on lines 1 and 3"),
        (b"a\nA\n", "the host A twice"),
        (b"node1 slots=4\n", "Line 1 .*'node1 slots=4'"),
        (b"\nnode1:4\n", "Line 2"),
        (b"-oProxyCommand=id\n", "Line 1"),
        (b"a;id\n", "Line 1"),
        (b"\xff\xfe\x00", "is not a text file"),
    ],
)
def test_content_that_makes_no_sense(content: bytes, named: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(content)
    with pytest.raises(InputError, match=named):
        read_hostfile(str(file))


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no hostfile"):
        read_hostfile(str(tmp_path / "missing"))
    with pytest.raises(InputError, match="cannot be read"):
        read_hostfile(str(tmp_path))
