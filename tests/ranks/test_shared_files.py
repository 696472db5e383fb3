"""Files that all ranks ask Keras for at the same time."""

from __future__ import annotations

import errno
import fcntl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tarantella as tnt
from tarantella.internals import keras as internals
from tarantella.keras import hooks

pytestmark = pytest.mark.ranks(2)

CONTENT = bytes(range(256)) * 64


class SlowServer(ThreadingHTTPServer):
    """Serves one file, in pieces, and counts how often it was asked for."""

    requests = 0


class _Pieces(BaseHTTPRequestHandler):
    server: SlowServer

    def do_GET(self) -> None:
        self.server.requests += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        for start in range(0, len(CONTENT), 4096):
            self.wfile.write(CONTENT[start : start + 4096])
            time.sleep(0.1)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[SlowServer]:
    server = SlowServer(("127.0.0.1", 0), _Pieces)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    tnt.barrier()
    server.shutdown()
    server.server_close()


def test_one_rank_downloads_a_file_for_all(
    server: SlowServer, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_HOME", str(shared_tmp_path))
    port = int(tnt.broadcast(server.server_port))
    path = keras.utils.get_file(
        "data.bin", f"http://127.0.0.1:{port}/data.bin", cache_dir=str(shared_tmp_path)
    )
    assert Path(path).read_bytes() == CONTENT
    tnt.barrier()
    assert server.requests == (1 if tnt.is_master_rank() else 0)


def test_a_cache_on_a_file_system_without_locks(
    server: SlowServer, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fcntl.flock

    def refuse(file: Any, operation: int) -> None:
        if Path(file.name).parent == shared_tmp_path:
            raise OSError(errno.ENOSYS, "Function not implemented")
        plain(file, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    test_one_rank_downloads_a_file_for_all(server, shared_tmp_path, monkeypatch)


def test_datasets_of_keras_are_downloaded_by_one_rank() -> None:
    assert keras.datasets.mnist.load_data.__globals__["get_file"] is keras.utils.get_file
    assert hooks.unhooked(keras.utils.get_file) is not keras.utils.get_file
    assert hooks.has_handler(hooks.GET_FILE)


def test_folder_that_another_rank_makes_at_the_same_time(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internals.file_utils, "exists", lambda path: False)  # not yet
    model = tnt.Model(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    model.compile(loss="mse")
    path = shared_tmp_path / "new" / "folder" / "{epoch}.weights.h5"
    checkpoint = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=2, verbose=0, callbacks=[checkpoint])
    assert sorted(each.name for each in path.parent.iterdir()) == ["1.weights.h5", "2.weights.h5"]
