"""Stands in for acl, the runtime of Ascend devices: a name to import, nothing of it is called."""
