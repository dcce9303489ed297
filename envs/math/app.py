"""This family as a NeMo Gym resources server; its YAML block names the family."""

from prorl_envs.nemo.server import EnvironmentServer

if __name__ == "__main__":
    EnvironmentServer.run_webserver()
