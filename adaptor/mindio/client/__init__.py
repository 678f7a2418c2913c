"""Lets an installed `mindio_ttp` (the SDK) replace the controller and the processor: TTP_ENGINE=mindio.

`engine` loads the SDK and checks its functions, `sdk_session` reports each step to the SDK, `saving` has the
handlers for the SDK and describes which rank holds which shard, `runtime` joins them in a worker. The
promises that do not hold with the SDK: docs/mindio.md.
"""
