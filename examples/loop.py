"""One environment in a plain gymnasium loop. Put your model in the place of `policy`."""

import json

import gymnasium

import prorl_envs.gym  # noqa: F401 - registers the ids


def policy(observation: str, turn: int) -> str:
    """An action is a text: a tool call in JSON, or an answer without a call, which ends the episode."""
    script = [
        {"name": "bash", "arguments": {"command": "echo 'hello, world' > greeting.txt"}},
        {"name": "finish", "arguments": {}},
    ]
    return json.dumps(script[turn])


def main() -> float:
    env = gymnasium.make("prorl/Bash-v0", render_mode="ansi", max_turns=10)
    observation, info = env.reset(seed=7, options={"task": "greeting"})
    reward, done = 0.0, False
    while not done:
        action = policy(observation, info["turn"])
        observation, step_reward, terminated, truncated, info = env.step(action)
        reward, done = float(step_reward), terminated or truncated
    if info.get("mask_sample"):  # our failure, not the policy's: such a sample teaches nothing
        print("no reward:", info["error"]["message"])
    else:
        print(env.render())
        print(f"reward {reward:g}: {info['grade']['components']}")
    env.close()
    return reward


if __name__ == "__main__":
    main()
