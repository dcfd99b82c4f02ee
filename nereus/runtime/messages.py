"""Framed messages between the driver and a worker over one local socket.

A frame is 8 bytes of length (little-endian) and a pickle of protocol 5. Pickle is safe here and only here: both ends
are processes of the same run, joined by an anonymous socket pair that nothing else can open. Files are never pickled.
"""

import io
import pickle
import socket
import struct
import threading
from typing import Any

import torch

_LENGTH = struct.Struct("<Q")


def encode(message: object) -> bytes:
    """Return `message` as bytes; tensors in it travel by value, as the elements they show (never the whole storage)."""
    buffer = io.BytesIO()
    _MessagePickler(buffer, protocol=5).dump(message)
    return buffer.getvalue()


def decode(data: bytes | bytearray) -> Any:
    """Return the message that `encode` made; tensors come back on the CPU, contiguous and writable."""
    return pickle.loads(data)


class MessageStream:
    """One end of a socket pair that carries messages; any thread may send, one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._send_lock = threading.Lock()
        self._header = bytearray()
        self._body: bytearray | None = None
        self._filled = 0

    def fileno(self) -> int:
        """Return the socket's descriptor, so that the stream can be given to `select`."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Send one message; blocks while the peer's buffer is full.

        Raises:
            OSError: the peer has closed its end.
        """
        data = encode(message)
        with self._send_lock:
            self._socket.sendall(_LENGTH.pack(len(data)))
            self._socket.sendall(data)

    def try_send(self, message: object) -> bool:
        """Send a small message without ever blocking; return False where that wasn't possible."""
        data = encode(message)
        frame = _LENGTH.pack(len(data)) + data
        if not self._send_lock.acquire(timeout=0.1):
            return False
        try:
            return self._socket.send(frame, socket.MSG_DONTWAIT) == len(frame)
        except OSError:
            return False
        finally:
            self._send_lock.release()

    def receive(self) -> Any:
        """Wait for one message and return it.

        Raises:
            EOFError: the peer has closed its end.
        """
        while True:
            complete, message = self._read_once(0)
            if complete:
                return message

    def receive_available(self) -> list[Any]:
        """Return the messages that have arrived whole, without blocking: a peer stopped in mid-message blocks nobody.

        Raises:
            EOFError: the peer has closed its end, and all whole messages before that were returned.
        """
        messages: list[Any] = []
        try:
            while True:
                complete, message = self._read_once(socket.MSG_DONTWAIT)
                if complete:
                    messages.append(message)
        except BlockingIOError:
            return messages
        except EOFError:
            if messages:
                return messages  # the next call meets the end again
            raise

    def close(self) -> None:
        """Close this end; the peer reads an end of file."""
        self._socket.close()

    def _read_once(self, flags: int) -> tuple[bool, Any]:
        """Read one piece of a frame; return (True, message) when it completed one."""
        try:
            if self._body is None:
                piece = self._socket.recv(_LENGTH.size - len(self._header), flags)
                count = len(piece)
                self._header += piece
            else:
                count = self._socket.recv_into(memoryview(self._body)[self._filled :], 0, flags)
                self._filled += count
        except ConnectionError as error:
            raise EOFError from error
        if count == 0:
            raise EOFError
        if self._body is None:
            if len(self._header) == _LENGTH.size:
                self._body, self._filled = bytearray(_LENGTH.unpack(self._header)[0]), 0
                self._header.clear()
            return False, None
        if self._filled < len(self._body):
            return False, None
        body, self._body = self._body, None
        return True, decode(body)


class _MessagePickler(pickle.Pickler):
    """Pickles tensors by value; torch's own reducer would take the whole storage behind a view along."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        dense = value.detach().cpu().contiguous()
        dtype = str(dense.dtype).removeprefix("torch.")
        elements: Any = dense.reshape(-1).view(torch.uint8).numpy() if dense.numel() else b""
        return _rebuild_tensor, (pickle.PickleBuffer(elements), dtype, tuple(dense.shape))


def _rebuild_tensor(elements: bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    if not elements:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(elements, dtype=getattr(torch, dtype)).view(shape)
