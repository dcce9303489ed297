"""Registry of loggers: built-in loggers, and loggers of other packages (see `prorl_envs.loggers.base`)."""

from collections.abc import Collection, Mapping
from importlib.metadata import EntryPoint, entry_points

from prorl_envs.errors import InputError
from prorl_envs.loggers.base import LoggerFactory, RunLogger

GROUP = "prorl_envs.loggers"

_BUILT_IN = {
    "mlflow": "prorl_envs.loggers.mlflow:MlflowLogger",
    "tensorboard": "prorl_envs.loggers.tensorboard:TensorboardLogger",
    "wandb": "prorl_envs.loggers.wandb:WandbLogger",
}


def logger_of(text: str) -> tuple[str, RunLogger]:
    """Create a logger. Return its name and the logger.

    Args:
        text: `NAME` or `NAME:KEY=VALUE,KEY=VALUE`.

    Raises:
        InputError: there is no such logger or option, or its package is not installed.
    """
    name, _, rest = text.partition(":")
    return name, _factory(name)(_options(name, rest))


def checked(name: str, options: Mapping[str, str], known: Collection[str]) -> Mapping[str, str]:
    """Check the options of a logger, and return them.

    Raises:
        InputError: an option is unknown.
    """
    if unknown := options.keys() - known:
        raise InputError(
            f"--log {name}: unknown option {min(unknown)!r}", hint=f"options: {', '.join(sorted(known))}"
        )
    return options


def _factory(name: str) -> LoggerFactory:
    third_party = {point.name: point for point in entry_points(group=GROUP)}
    points = third_party | {known: EntryPoint(known, value, GROUP) for known, value in _BUILT_IN.items()}
    if name not in points:
        raise InputError(f"--log: no logger is called {name!r}", hint=f"loggers: {', '.join(sorted(points))}")
    try:
        factory: LoggerFactory = points[name].load()
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"logger {name!r} cannot be imported from {points[name].value}: {error}",
            hint="install the dependencies of its package",
        ) from error
    return factory


def _options(name: str, text: str) -> dict[str, str]:
    options = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise InputError(
                f"--log {name}: {part!r} is not an option", hint=f"--log {name}:KEY=VALUE,KEY=VALUE"
            )
        options[key] = value
    return options
