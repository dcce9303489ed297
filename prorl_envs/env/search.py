"""Settings of the back end of search tools. The `stem` environment has the back ends."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Self

from prorl_envs.errors import InputError, expand_user


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """Choice of the search back end, and its settings.

    Args:
        backend: `index`, or the name of a web service.
        corpus: for `index`: a folder of texts; None takes the family's sample.
        url: address of a web service, if it is not the usual one.
        key: key of a web service. Stays in this process.
        timeout_s: timeout of a request to a web service, in seconds.
    """

    backend: str = "index"
    corpus: Path | None = None
    url: str = ""
    key: str = field(default="", repr=False)
    timeout_s: float = 20.0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Read `PRORL_SEARCH__BACKEND` and similar variables, for callers without a settings file.

        Raises:
            InputError: a variable is unknown, or the timeout is not a number.
        """
        prefix = "PRORL_SEARCH__"
        found = {
            name.removeprefix(prefix).lower(): text
            for name, text in environ.items()
            if name.startswith(prefix)
        }
        if unknown := found.keys() - {setting.name for setting in fields(cls)}:
            raise InputError(f"unknown setting search.{min(unknown)}")
        try:
            timeout_s = float(found.get("timeout_s", 20.0))
        except ValueError as error:
            raise InputError("setting search.timeout_s: not a number") from error
        corpus = expand_user(found["corpus"]) if found.get("corpus") else None
        texts = {key: found[key] for key in ("backend", "url", "key") if key in found}
        return cls(corpus=corpus, timeout_s=timeout_s, **texts)
