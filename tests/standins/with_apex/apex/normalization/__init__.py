"""Layer norms in one kernel."""

from apex.normalization import fused_layer_norm

__all__ = ["fused_layer_norm"]
