"""The versions of frameworks with which jobs were trained, with faults: docs/compatibility.md."""

from adaptor.frameworks import tested_versions

MEGATRON = tested_versions.specifier(tested_versions.CORE)

# ModelLink has no version in its package; a commit is named.
MODELLINK = "commit af1347"

# Megatron-core 0.6 does not have this module: what came later may be missing there, too.
SINCE_0_7 = "megatron.core.distributed.distributed_data_parallel_config"
