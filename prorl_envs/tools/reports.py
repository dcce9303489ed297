"""The out-of-band word of a shell that a command has ended. Pure."""


class Reports:
    """Reads `nonce status directory NUL` from the pipe on which a shell reports.

    A command that finds the pipe can write to it too; without the nonce of the moment that is ignored.
    """

    #: Bytes of the longest report: the shell cuts the directory at 4,096 characters.
    LIMIT = 4 * 4096 + 64

    def __init__(self, rest: bytes = b"") -> None:
        #: The beginning of a report that is not complete.
        self.rest = rest

    def feed(self, data: bytes, nonce: str) -> tuple[int, str] | None:
        """Take what arrived; return status and directory once the report with `nonce` is complete."""
        *reports, rest = (self.rest + data).split(b"\0")
        self.rest = rest[-self.LIMIT :]
        prefix = nonce.encode() + b" "
        for report in reports:
            # Garbage without a NUL may stand before it.
            start = report.rfind(prefix)
            if start >= 0:
                status, _, directory = report[start + len(prefix) :].partition(b" ")
                if status.isdigit() and len(status) <= 3:
                    return int(status), directory[: self.LIMIT].decode("utf-8", "replace")
        return None
