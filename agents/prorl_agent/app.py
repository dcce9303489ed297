# SPDX-FileCopyrightText: 2026 the authors of prorl-envs
# SPDX-License-Identifier: Apache-2.0
"""The agent whose rollouts are the rollout service's; its YAML block names the service."""

from prorl_envs.nemo.agent import RolloutAgent

if __name__ == "__main__":
    RolloutAgent.run_webserver()
