# SPDX-FileCopyrightText: 2026 the authors of prorl-envs
# SPDX-License-Identifier: Apache-2.0
"""Environment server that passes episodes to a rollout service; its YAML block names the service."""

from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint

from prorl_envs.nemo.environment_server import RolloutEnvironmentServer
from prorl_envs.nemo.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    RolloutEnvironmentServer.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):  # one of several workers
    app = RolloutEnvironmentServer.run_webserver()
