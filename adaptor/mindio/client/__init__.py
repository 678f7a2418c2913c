"""Lets an installed `mindio_ttp` (the SDK) replace the controller and the processor: TTP_ENGINE=mindio.

`sdk` finds it and checks that it has the needed functions, `copies` describes in its terms which rank holds
what, `session` reports each step to it, `saving` has the handlers that it calls, `runtime` joins them in a
worker. docs/mindio.md says which promises do not hold with it.
"""
