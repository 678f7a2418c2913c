"""Lets an installed `mindio_ttp` (the SDK) replace the controller and the processor: TTP_ENGINE=mindio.

`engine` loads the SDK and checks its functions. `runtime` reports each step to the SDK, has the handlers for
the SDK, describes which rank holds which shard, and joins these parts in a worker. The promises that do not
hold with the SDK: docs/mindio.md.
"""
