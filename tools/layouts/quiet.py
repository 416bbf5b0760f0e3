"""Preloaded by a tool's rank pool, before anything that warns: what libraries say at import and at work stays off the console."""

from slime_ppo.orchestration.local_ranks import quiet_libraries

quiet_libraries()
