"""Types that the signatures of converters name."""


class DataType: ...


class Tensor: ...


class TensorSpec: ...
