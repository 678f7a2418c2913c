"""Stand-in for NVIDIA's Emerging Optimizers: of Muon, what Megatron-core 0.16 calls."""
