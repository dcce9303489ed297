#!/bin/sh
# Record the demo for the animated picture in the README: record-demo.sh [OUTPUT.svg]. Uses termtosvg from PyPI.
# The recorded demo is shorter than `make demo`: two tasks per environment, and one SWE-bench instance.
set -eu
cd "$(dirname "$0")/.."
output=$(realpath "${1:-docs/images/demo.svg}")
scripts/setup.sh demo .venv
bin=$PWD/.venv/bin
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT

# The scripted model solves some samples of a task, depending on their order. Find a solved one.
cat >"$work/solved.py" <<END
from prorl_envs.rollout.client.result_files import read_results

found = (result for result in read_results("runs/latest") if result.task_id == "log-top-client")
print(next(result.job_id for result in found if result.reward == 1))
END
cat >"$work/session" <<END
cd "$work"
export PATH="$bin:\$PATH" COLUMNS=110
prompt() { clear; printf '\033[32m$\033[0m %s\n' "\$1"; sleep 1.5; }
prompt "make demo"
prorl-envs demo --tasks 2 --swebench 1
sleep 6
job=\$(python "$work/solved.py")
prompt "prorl-envs show runs/latest \$job"
prorl-envs show runs/latest "\$job"
sleep 6
END
tool="'$PWD/scripts/uv.sh' tool run --quiet --with 'setuptools<81' termtosvg==1.1.0"
# The recorder needs a terminal; `script` provides one.
TERM=xterm-256color script -qec \
    "$tool record --screen-geometry 112x40 --command 'sh $work/session' $work/demo.cast" /dev/null >/dev/null
eval "$tool render --template window_frame --min-frame-duration 100 --max-frame-duration 4000 --loop-delay 4000 \
    $work/demo.cast '$output'"
printf '%s: %s bytes\n' "$output" "$(wc -c <"$output")" >&2
