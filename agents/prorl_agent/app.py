# SPDX-FileCopyrightText: 2026 the authors of prorl-envs
# SPDX-License-Identifier: Apache-2.0
"""Server of the agent that passes rollouts to a rollout service; its YAML block names the service."""

from prorl_envs.nemo.agent import RolloutAgent
from prorl_envs.nemo.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    RolloutAgent.run_webserver()
