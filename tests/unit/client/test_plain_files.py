"""Files that are read whole: what is no regular file, or too large, is refused at once."""

from __future__ import annotations

import os
import socket
import threading
from functools import partial

import pytest

from paceline import Tls
from paceline.credentials import Credentials
from paceline.errors import InvalidFieldError
from paceline.plain_files import UnusableFileError, read_plain_file
from paceline_gateway.http.certificate import server_context
from paceline_serving.security import TlsFiles, server_credentials


def fifo(path):
    os.mkfifo(path)
    return path


def listening_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    return path


def link_to(target, path):
    path.symlink_to(target)
    return path


def folder(path):
    path.mkdir()
    return path


@pytest.mark.parametrize(
    "made",
    [fifo, folder, listening_socket, partial(link_to, "/dev/zero"), partial(link_to, "/dev/null")],
)
def test_what_is_no_regular_file_is_refused_without_waiting_and_named(made, tmp_path):
    path = made(tmp_path / "odd")
    with pytest.raises(UnusableFileError, match=r"odd: is not a regular file"):
        read_plain_file(path, most_bytes=10)


def test_a_file_may_hold_as_much_as_the_limit_and_no_more(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_plain_file(path, most_bytes=10) == b"0123456789"
    with pytest.raises(UnusableFileError, match=r"file: has more than 9 bytes"):
        read_plain_file(path, most_bytes=9)


def test_a_file_that_says_it_is_empty_is_read_up_to_the_limit():
    with pytest.raises(UnusableFileError, match="more than 10 bytes"):
        read_plain_file("/proc/self/status", most_bytes=10)


def test_a_sparse_file_of_a_terabyte_is_refused_by_its_size(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnusableFileError, match=f"more than {1 << 30} bytes"):
        read_plain_file(path, most_bytes=1 << 30)


def test_a_mounted_secret_which_is_a_link_to_a_link_is_read(tmp_path):
    version = tmp_path / "..2026_11_25"
    version.mkdir()
    (version / "key").write_bytes(b"secret")
    (tmp_path / "..data").symlink_to(version.name)
    (tmp_path / "key").symlink_to("..data/key")
    assert read_plain_file(tmp_path / "key", most_bytes=100) == b"secret"


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_plain_file(tmp_path / "nothing", most_bytes=10)


def test_a_pipe_is_read_where_a_user_may_name_one(tmp_path):
    path = fifo(tmp_path / "pipe")
    writer = threading.Thread(target=path.write_bytes, args=(b"a prompt",))
    writer.start()
    assert read_plain_file(path, most_bytes=8, allow_pipe=True) == b"a prompt"
    writer.join()
    device = link_to("/dev/zero", tmp_path / "zero")
    with pytest.raises(UnusableFileError, match="regular"):
        read_plain_file(device, most_bytes=8, allow_pipe=True)


@pytest.mark.parametrize("name", ["ca_file", "certificate_file", "key_file"])
def test_a_clients_certificate_that_is_a_pipe_is_refused(name, tmp_path):
    path = fifo(tmp_path / "pem")
    files = {"certificate": b"", "key": b""} if name != "ca_file" else {}
    files.pop(name.removesuffix("_file"), None)
    with pytest.raises(InvalidFieldError, match=r"pem: is not a regular file"):
        Credentials(Tls(**{name: path}, **files))


async def test_a_servers_certificate_that_is_a_pipe_is_refused(tmp_path):
    path = fifo(tmp_path / "pem")
    with pytest.raises(OSError, match="is not a regular file"):
        server_credentials(TlsFiles(certificate=path, key=path))
    with pytest.raises(OSError, match="is not a regular file"):
        server_context(path, path)
