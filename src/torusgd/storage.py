"""Buckets and web servers, read and written by URL: `s3://`, `gs://`, `hf://`, `https://`, through fsspec."""

import errno
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from .errors import RunError, UserError, as_user_error, in_one_line, is_transient, needs, retry

SCHEMES = ("s3", "gs", "hf", "http", "https")
CACHE = "TORUSGD_CACHE"
PAUSES = (0.2, 1.0, 3.0)  # seconds before each further attempt
_SECONDS = 30  # seconds without a byte that end an attempt; huggingface_hub has 10 of its own (HF_HUB_DOWNLOAD_TIMEOUT)
_SMALL_SECONDS = 60  # seconds of an attempt at a call of a few bytes, all retries of the store's library included
_SLOWEST = 10_000  # bytes a second below which a read is given up
_LATER = (408, 429)  # HTTP's statuses below 500 that may pass
_PLAIN = {"Accept-Encoding": "identity"}  # for the web: a part of a file that a server packs would be of other bytes
# Packages by kind of URL, if it is not the web's.
_PACKAGES = {
    "s3": "fsspec s3fs (the extra s3)", "gs": "gcsfs (the extra gcs)", "hf": "huggingface_hub (the extra huggingface)",
}  # fmt: skip

T = TypeVar("T")


def url_of(path: Path | None) -> str | None:
    """The URL that a user gave instead of a path; None: it is a path. A `Path` folds the two slashes into one.

    >>> url_of(Path("s3://bucket/images")), url_of(Path("data/images"))
    ('s3://bucket/images', None)
    """
    found = re.fullmatch(r"([a-z0-9]+):/+(.+)", str(path)) if path is not None else None
    return f"{found[1]}://{found[2]}" if found is not None and found[1] in SCHEMES else None


def place(path: Path) -> str:
    """A folder or URL as the user gave it.

    >>> place(Path("s3://bucket/run")), place(Path("runs/digits"))
    ('s3://bucket/run', 'runs/digits')
    """
    return url_of(path) or str(path)


def check_scheme(word: str) -> None:
    """UserError if a URL's scheme is not known, or no bucket follows; as a path it would be a folder `scheme:`.

    >>> check_scheme("s3://bucket/run"), check_scheme("runs/digits")
    (None, None)
    """
    scheme, is_url, bucket = word.partition("://")
    if is_url and re.fullmatch("[A-Za-z][A-Za-z0-9+.-]*", scheme) and scheme not in SCHEMES:
        raise UserError(f"{word}: {scheme}:// is not known; there are {', '.join(f'{each}://' for each in SCHEMES)}")
    if is_url and scheme in SCHEMES and not bucket.strip("/"):
        raise UserError(f"{word}: names no bucket; wanted is such as {scheme}://BUCKET/FOLDER")


def cache_folder() -> Path:
    """This machine's folder for copies of objects: TORUSGD_CACHE, or else ~/.cache/torusgd."""
    return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "torusgd")


def unusable(what: str, error: OSError) -> UserError | RunError:
    """The error of a command for which a store, `what` of it, can't be used; it may pass, or the user must mend it."""
    why = f"{error.strerror}: {error.filename!r}" if error.strerror else str(error)
    return (RunError if is_transient(error) or error.errno == errno.ENOSPC else UserError)(f"{what}: {why}")


class Store:
    """The objects below a URL such as s3://bucket/folder, by their names relative to it. Safe from several threads.

    An object appears when it is written whole. Every exception of a store's library becomes an OSError, and transient
    ones are tried again here. UserError if the package for its kind is not installed, or the URL is none.
    """

    def __init__(self, url: str) -> None:
        scheme = url.partition(":")[0]
        packages = _PACKAGES.get(scheme, "fsspec aiohttp (the extra web)")
        not_one = as_user_error(f"{url}: no URL of a bucket or a web server", of=ValueError)
        with needs(f"{url}: a package for it is missing", packages), not_one:
            from fsspec import filesystem

            self._files = filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **_timeouts(scheme))
            # Not `url_to_fs`, to which a name with `::` is a chain of stores, and `?versionId=` or `#` a version.
            root = self._files._strip_protocol(url)
        self.url, self._is_web = url.rstrip("/"), scheme.startswith("http")
        self._root = root.rstrip("/")
        # fsspec takes a timeout for every call of an asynchronous file system, as S3's, Google's and the web's are.
        self._small = {"timeout": _SMALL_SECONDS} if self._files.async_impl else {}

    def read(self, name: str, begin: int | None = None, end: int | None = None) -> bytes:
        """An object's bytes, or those from `begin` up to `end`; OSError of a fitting kind if it can't be read whole.

        UserError if the server sends more than the part: each image would be a download of its whole shard.
        """
        wanted = end - begin if begin is not None and end is not None else None
        # Else a connection that trickles would have no end.
        limit = {each: seconds + (wanted or 0) / _SLOWEST for each, seconds in self._small.items()}

        def read() -> bytes:
            if self._is_web and begin is not None and wanted is not None:
                data = self._web_part(self._path(name), begin, wanted, **limit)
            else:
                data = self._files.cat_file(self._path(name), start=begin, end=end, **limit)
            if wanted is not None and len(data) < wanted:
                raise OSError(errno.EIO, f"{len(data)} bytes came of {wanted}")
            return data

        data = self._patiently(name, read)
        if wanted is not None and len(data) > wanted:
            raise UserError(f"{self.url}/{name}: the server ignores Range and sends whole files; take one that has it")
        return data

    def get(self, name: str, file: Path) -> None:
        self._patiently(name, lambda: self._files.get_file(self._path(name), str(file)))

    def write(self, name: str, data: bytes) -> None:
        """Makes or replaces an object; OSError if it can't."""
        self._patiently(name, lambda: self._files.pipe_file(self._path(name), data, **self._small))

    def create(self, name: str, data: bytes) -> bool:
        """Makes an object unless there is one of that name, in which case it is False; OSError if it can't."""
        # Of several that try at a time one succeeds, in a store with conditional writes: S3 and compatible ones
        # (If-None-Match), Google's (ifGenerationMatch). Other stores look for the object before they write it.
        try:
            self._patiently(name, lambda: self._files.pipe_file(self._path(name), data, mode="create", **self._small))
        except FileExistsError:
            return self.read(name) == data  # an attempt whose answer was lost may have been the one
        return True

    def put(self, file: Path, name: str) -> None:
        """Copies a file to an object, in parts if it is large; OSError if it can't."""
        self._patiently(name, lambda: self._files.put_file(str(file), self._path(name)))

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._patiently(name, lambda: self._files.rm_file(self._path(name), **self._small))

    def abort_uploads(self, is_own: Callable[[str], object]) -> None:
        """Gives up uploads in parts, to objects of these names, that a killed process has left: S3 keeps their parts.

        OSError if it can't; Google's storage and the hub forget such parts by themselves.
        """
        if not self.url.startswith("s3:"):
            return
        bucket, _, key = self._root.partition("/")
        before, within = f"{key}/" if key else "", {"Bucket": bucket, **self._small}
        found = self._patiently("", lambda: self._files.call_s3("list_multipart_uploads", Prefix=before, **within))
        for each in found.get("Uploads", ()):
            if is_own(each["Key"].removeprefix(before)):
                about = {"Key": each["Key"], "UploadId": each["UploadId"], **within}
                with suppress(FileNotFoundError):  # its process may be at work still, and have ended it
                    self._patiently("", partial(self._files.call_s3, "abort_multipart_upload", **about))

    def sizes(self) -> dict[str, int]:
        """The bytes of every object, by name; none if a server doesn't list its objects."""
        try:
            found = self._patiently("", lambda: self._files.find(self._root, detail=True, **self._small))
        except FileNotFoundError:
            return {}
        return {
            name[len(self._root) + 1 :]: int(info["size"])
            for name, info in found.items()
            if name.startswith(f"{self._root}/") and not name.endswith("/") and info.get("size") is not None
        }

    def size(self, name: str) -> int:
        """The bytes of an object; raises as `read`."""
        return int(self._patiently(name, lambda: self._files.info(self._path(name), **self._small))["size"])

    def modified(self, name: str) -> float:
        """The time of an object's last write, by the store's clock, in seconds since 1970; raises as `read`."""
        return float(self._patiently(name, lambda: self._files.modified(self._path(name))).timestamp())

    def version(self, name: str) -> str:
        """A text that changes whenever the object does, as far as the store reports it; raises as `read`."""
        found = self._patiently(name, lambda: self._files.info(self._path(name), **self._small))
        # Where a server redirects to is another URL each time, if it is a signed one.
        return repr(sorted((str(key), str(value)) for key, value in found.items() if key != "url"))

    def _web_part(self, path: str, begin: int, wanted: int, timeout: float) -> bytes:
        """A part of a file, and a byte more if the server ignores Range: the whole may be larger than the memory."""
        from fsspec.asyn import sync

        async def part() -> bytes:
            session = await self._files.set_session()
            headers = {"Range": f"bytes={begin}-{begin + wanted - 1}", **_PLAIN}
            async with session.get(self._files.encode_url(path), headers=headers) as answer:
                self._files._raise_not_found_for_status(answer, path)
                data = b""
                while len(data) <= wanted and (more := await answer.content.read(wanted + 1 - len(data))):
                    data += more
                return data

        data: bytes = sync(self._files.loop, part, timeout=timeout)
        return data

    def _path(self, name: str) -> str:
        # In a URL of the web `#`, `?` and `%` of a name would be something else.
        return f"{self._root}/{quote(name) if self._is_web else name}" if name else self._root

    def _patiently(self, name: str, call: Callable[[], T]) -> T:
        def line(error: BaseException) -> str:
            # The text of fsspec's error is the URL, which the message has already.
            status = getattr(error.__cause__, "status", None)
            return f"HTTP status {status}" if status is not None else in_one_line(error)[:300]

        def attempt() -> T:
            try:
                return call()
            except FileExistsError:
                raise
            except (FileNotFoundError, PermissionError) as error:
                # fsspec reports a web server that can't be reached, or that fails, as one that lacks the file.
                if isinstance(error.__cause__, OSError):
                    raise OSError(errno.EIO, line(error.__cause__), f"{self.url}/{name}") from error
                if (status := getattr(error.__cause__, "status", 404)) >= 500 or status in _LATER:
                    raise OSError(errno.EIO, line(error), f"{self.url}/{name}") from error
                raise type(error)(error.errno or errno.ENOENT, line(error), f"{self.url}/{name}") from error
            except Exception as error:  # of the store's library, of its library's library, of the network
                if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):  # of the copy that `get` makes
                    raise OSError(errno.ENOSPC, "this machine's disk is full", f"{self.url}/{name}") from error
                raise OSError(errno.EIO, line(error), f"{self.url}/{name}") from error

        # Whatever the store's library raised is an OSError by now.
        return retry(attempt, PAUSES, lambda error: isinstance(error, OSError) and is_transient(error))


def _timeouts(scheme: str) -> dict[str, Any]:
    """Arguments by which a store's library gives up a connection without data, and goes by the environment's proxies.

    S3's library and the hub's go by HTTPS_PROXY and NO_PROXY by themselves.
    """
    if scheme == "s3":
        limits = {"connect_timeout": _SECONDS, "read_timeout": _SECONDS, "retries": {"max_attempts": 1}}
        return {"config_kwargs": limits}
    if scheme not in ("gs", "http", "https"):
        return {}
    from aiohttp import ClientTimeout

    limit = ClientTimeout(total=None, sock_connect=_SECONDS, sock_read=_SECONDS)
    if scheme == "gs":
        return {"requests_timeout": limit, "session_kwargs": {"trust_env": True}}
    return {"client_kwargs": {"timeout": limit, "trust_env": True}, "headers": _PLAIN}
