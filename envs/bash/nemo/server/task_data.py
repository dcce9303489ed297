# SPDX-FileCopyrightText: 2026 the authors of prorl-envs
# SPDX-License-Identifier: Apache-2.0
"""Schema of this family's rows, for `gym env schema`, `gym dataset collate` and imports (NeMo Gym 0.7)."""

from prorl_envs.nemo.rows import task_data

TaskData = task_data("bash")
