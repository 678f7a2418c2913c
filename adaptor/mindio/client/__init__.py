"""An installed `mindio_ttp` (the SDK) in the place of the controller and the processor: TTP_ENGINE=mindio.

`sdk` finds it and asks whether it has what is needed, `copies` says who holds what in its words, `session`
tells it of each step, `saving` does what its handlers are to do, `runtime` is this worker's one of all that.
What the SDK does not do for the job, and so is not promised with it: docs/mindio.md.
"""
