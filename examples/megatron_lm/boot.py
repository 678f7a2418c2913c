"""The boot file for a platform that starts a .py (ModelArts, AICC): it becomes `ttprun`.

It lies beside the training script. The arguments of the job, such as ModelArts' hyperparameters, go to the
training script; settings of the adaptor stand here as flags, or in the environment of the job (TTP_STORE).
"""

import sys
from pathlib import Path

from adaptor.launchers.cli.entry import main

sys.argv[1:1] = ["--max-restarts", "3", str(Path(__file__).with_name("pretrain_gpt.py"))]
sys.exit(main())
