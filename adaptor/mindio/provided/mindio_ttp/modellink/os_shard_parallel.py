"""The group over which the gradient norm of replicated shards is summed."""

from adaptor.frameworks.mindio_modellink_groups import get_os_shard_group

__all__ = ["get_os_shard_group"]
