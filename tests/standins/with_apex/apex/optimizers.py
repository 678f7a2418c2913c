"""Names: FusedAdam is replaced by MindSpeed's AdamW, FusedSGD is not there without CUDA."""


class FusedAdam:
    """Replaced before anyone makes one."""


class FusedSGD:
    """Not for use."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError("apex.optimizers.FusedSGD")
