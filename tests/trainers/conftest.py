"""Results as a service gives them, and a service that a trainer without an event loop can call."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import strategies as st

from prorl_envs.errors import FailureKind
from prorl_envs.policy.types import VersionSpan
from prorl_envs.rollout.types import Failure, JobState, Result, Stage, StopReason, Trajectory, TurnRecord
