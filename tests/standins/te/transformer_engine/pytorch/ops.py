"""Names, which Megatron-LM has in signatures."""


class FusibleOperation:
    pass


class Sequential:
    pass
