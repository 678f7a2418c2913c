"""The versions of frameworks with which jobs were trained, with faults: docs/compatibility.md."""

MEGATRON = ">=0.6,!=0.7.*,!=0.9.*,!=0.10.*,!=0.11.*,!=0.13.*,!=0.14.*,!=0.17.*,!=0.18.*,!=0.19.*,<0.21"

# ModelLink has no version in its package; a commit is named.
MODELLINK = "commit af1347"

# Megatron-core 0.6 does not have this module: what came later may be missing there, too.
SINCE_0_7 = "megatron.core.distributed.distributed_data_parallel_config"
