"""Clusters whose processes outlast a test, for the next test that starts the same workers.

A rank takes about five seconds of a processor to start and to import, which is longer than it
trains a tiny model. A run takes over the processes of its warm-up (`SpareHosts.keeping`); here a
test takes over those of an earlier one in the same way, with a worker of its own.
"""

import inspect

# First, as it sets what Ray reads when it is imported: ranks start in this environment, and not in
# one that Ray would build for a command of `uv run`.
from rl_policy import RayVirtualCluster
from rl_policy.ray.hosts import SpareHosts

# isort: split
import ray


class KeptHosts(SpareHosts):
    """The actors of every group that has ended in order: together they fit in the bundles."""

    def __init__(self):
        super().__init__()
        self._kept = []

    def keep(self, kind, hosts):
        self._kept.append((kind, list(hosts)))
        return True

    def take(self, kind):
        found = next((each for each in self._kept if each[0] == kind), None)
        if found is None:
            # They hold CPUs of the bundles, which a group of another kind may need.
            self.end()
            return []
        self._kept.remove(found)
        return found[1]

    def end(self):
        for _, hosts in self._kept:
            for host in hosts:
                ray.kill(host)
        self._kept.clear()


class KeptCluster(RayVirtualCluster):
    """A cluster that `shutdown` gives back to the pool that it is from."""

    def __init__(self, *, pool, **kwargs):
        self._pool = pool
        super().__init__(**kwargs)
        self.spare_hosts = KeptHosts()

    def shutdown(self):
        if self._pool is not None and self not in self._pool:
            self._pool.append(self)

    def end(self):
        """Shut down indeed."""
        self._pool = None
        super().shutdown()


_pools = {}


def kept_cluster(*args, **kwargs):
    """Return a cluster like `RayVirtualCluster(...)`, with the processes of earlier ones."""
    bound = inspect.signature(RayVirtualCluster).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.arguments["use_gpus"] is None:
        bound.arguments["use_gpus"] = ray.cluster_resources().get("GPU", 0) > 0
    pool = _pools.setdefault(str(bound.arguments), [])
    return pool.pop() if pool else KeptCluster(**bound.arguments, pool=pool)


def end_kept_clusters():
    """End the clusters that no test holds, and their processes."""
    for pool in _pools.values():
        while pool:
            pool.pop().end()
