"""Zygotes: processes that are started once and forked for each tool server. Begin with `zygote.py`."""
