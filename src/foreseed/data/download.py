"""Downloads that survive a broken connection and are checked before anyone sees them."""

from __future__ import annotations

import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import TypeAlias

from foreseed.data.errors import DataError
from foreseed.data.files import md5_of, writing

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes that are there, and the bytes there will be (None: the server did not say)."""

TRIES = 4
"""Tries in a row that may bring nothing new before an address is given up."""
TIMEOUT = 30.0
_CHUNK = 1 << 18


class _TransferError(Exception):
    """An address did not deliver; `final` when asking again is pointless."""

    def __init__(self, reason: object, final: bool = False) -> None:
        super().__init__(str(reason))
        self.final = final


def fetch(
    addresses: Sequence[str], target: Path, md5: str, progress: Progress | None = None, pause: float = 1.0
) -> None:
    """Bring a file here from the first address that delivers it whole; an interrupted download goes on where it was.

    What has arrived waits in `<target>.part`. The file gets its name only once its MD5 is right.
    `pause` is the wait in seconds before the second try; it doubles with every further one.
    """
    part = target.with_name(f"{target.name}.part")
    failures = []
    with writing(part):
        target.parent.mkdir(parents=True, exist_ok=True)
        for address in addresses:
            try:
                _fetch_checked(address, part, md5, progress, pause)
                os.replace(part, target)
                return
            except _TransferError as error:
                failures.append(f"{address}: {error}")
    raise DataError(
        f"could not download {target.name} ({'; '.join(failures)}); try again later, or get the file another way, "
        f"put it at {target} and run the same command again"
    )


def _fetch_checked(address: str, part: Path, md5: str, progress: Progress | None, pause: float) -> None:
    """Complete `part` and check it; what is left of an older version of the file is thrown away."""
    resumed = part.exists()
    _complete(address, part, progress, pause)
    found = md5_of(part)
    if found != md5 and resumed:
        part.unlink()
        _complete(address, part, progress, pause)
        found = md5_of(part)
    if found != md5:
        part.unlink()
        raise _TransferError(f"what came has MD5 {found}, expected {md5}, and was removed")


def _complete(address: str, part: Path, progress: Progress | None, pause: float) -> None:
    """Try again until `part` is whole, as long as the tries get anywhere."""
    idle = 0
    while True:
        before = _size(part)
        try:
            _transfer(address, part, progress)
            return
        except _TransferError as error:
            idle = 1 if _size(part) > before else idle + 1
            if error.final or idle == TRIES:
                raise
            time.sleep(pause * 2 ** (idle - 1))


def _transfer(address: str, part: Path, progress: Progress | None) -> None:
    """One request: everything after what `part` already holds, or everything if the server cannot skip."""
    response = _open(address, _size(part))
    if response is None:
        return
    with response, open(part, "ab" if response.status == 206 else "wb") as file:
        done = file.tell()
        length = response.headers.get("Content-Length")
        total = done + int(length) if length and length.isdigit() else None
        while chunk := _read(response):
            file.write(chunk)
            done += len(chunk)
            if progress:
                progress(part.name.removesuffix(".part"), done, total)
    if total is not None and done < total:
        raise _TransferError(f"the connection broke after {done:,} of {total:,} bytes")


def _open(address: str, start: int) -> HTTPResponse | None:
    """Ask for the bytes from `start` on; None when there are none."""
    request = urllib.request.Request(address, headers={"User-Agent": "foreseed"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        response: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
        return response
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:
            return None
        temporary = error.code >= 500 or error.code in (408, 429)
        raise _TransferError(f"HTTP {error.code} {error.reason}", final=not temporary) from None
    except urllib.error.URLError as error:
        # A name that cannot be looked up means no network: better said at once than after all tries.
        raise _TransferError(error.reason, final=isinstance(error.reason, socket.gaierror)) from None
    except (OSError, HTTPException) as error:
        raise _TransferError(error) from None


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, HTTPException) as error:
        raise _TransferError(f"the connection broke ({error})") from None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
