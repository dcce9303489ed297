"""Reports of a shell about finished commands, sent over a separate pipe. Pure."""


class Reports:
    """Parser of `nonce status directory NUL` from the pipe for a shell's reports.

    A command that finds the pipe can also write to it; data without the current nonce is ignored.
    """

    #: Bytes of the longest report: the shell cuts the directory at 4,096 characters.
    LIMIT = 4 * 4096 + 64

    def __init__(self) -> None:
        #: Start of an incomplete report.
        self.rest = b""

    def feed(self, data: bytes, nonce: str) -> tuple[int, str] | None:
        """Add received bytes; return status and directory once the report with `nonce` is complete."""
        *reports, rest = (self.rest + data).split(b"\0")
        self.rest = rest[-self.LIMIT :]
        prefix = nonce.encode() + b" "
        for report in reports:
            # Garbage without a NUL may precede the report.
            start = report.rfind(prefix)
            if start >= 0:
                status, _, directory = report[start + len(prefix) :].partition(b" ")
                if status.isdigit() and len(status) <= 3:
                    return int(status), directory[: self.LIMIT].decode("utf-8", "replace")
        return None
