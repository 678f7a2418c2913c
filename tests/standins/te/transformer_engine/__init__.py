"""A stand-in for Transformer Engine 2.3 on a CPU: fp8 weights, fp8 matrix products, and its Adam.

Attributes, dtypes and rounding rules are those of its sources; the products are made of dequantized numbers.
"""

from transformer_engine import common, pytorch

__version__ = "2.3.0"
__all__ = ["common", "pytorch"]
