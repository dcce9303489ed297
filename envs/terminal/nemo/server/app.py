# SPDX-FileCopyrightText: 2026 the authors of prorl-envs
# SPDX-License-Identifier: Apache-2.0
"""NeMo Gym resources server of this family; its YAML block names the family."""

from prorl_envs.nemo.fixture import verifier_fixture
from prorl_envs.nemo.server import EnvironmentServer

#: Used by `gym env test` and `gym env publish`; None if this version of NeMo Gym has no fixtures (0.4).
VERIFIER_FIXTURE = verifier_fixture("terminal", __file__)

if __name__ == "__main__":
    EnvironmentServer.run_webserver()
