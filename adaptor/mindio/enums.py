"""The numbers of the newer form."""

from __future__ import annotations

from enum import Enum


class OptimizerType(Enum):
    ATTENTION = 0
    MOE = 1


class Action(Enum):
    """The results of the original's `tft_wait_next_action`."""

    RETRY = 0
    EXIT = 1


class ReportState(Enum):
    RS_NORMAL = 0
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_INIT_FINISH = 5
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


class RepairType(Enum):
    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1
    RT_UCE_LOWLEVEL = 2
    RT_RECV_REPAIR = 3
    RT_ROLLBACK = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6
